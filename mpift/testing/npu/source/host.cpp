#include <Python.h>

#include "host.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

namespace simulated_npu {

namespace {

constexpr const char* kCountVariable = "MPIFT_SIMULATED_NPUS";
constexpr int kUsualDevices = 2;

thread_local c10::DeviceIndex device_of_thread = 0;
std::atomic<bool> used{false};
std::atomic<bool> forked_after_use{false};

int count_from_environment() {
  const char* text = std::getenv(kCountVariable);
  const int count = text == nullptr ? kUsualDevices : std::atoi(text);
  // The Python side refuses what is no number in range, before it loads this library.
  return std::clamp(count, 1, kMostDevices);
}

} // namespace

c10::DeviceIndex device_count() {
  static const int count = count_from_environment();
  return static_cast<c10::DeviceIndex>(count);
}

c10::DeviceIndex current_device() {
  return device_of_thread;
}

c10::DeviceIndex resolved(c10::DeviceIndex index) {
  if (index == -1) {
    return device_of_thread;
  }
  TORCH_CHECK(
      index >= 0 && index < device_count(),
      "invalid NPU device id ", static_cast<int>(index), ": there are ",
      static_cast<int>(device_count()), " simulated NPUs, numbered from 0 (", kCountVariable, ")");
  return index;
}

void set_current_device(c10::DeviceIndex index) {
  device_of_thread = resolved(index);
}

void set_current_device_unchecked(c10::DeviceIndex index) noexcept {
  device_of_thread = index;
}

void use() {
  TORCH_CHECK(
      !forked_after_use,
      "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use"
      " the 'spawn' start method");
  if (!used.exchange(true)) {
    pthread_atfork(nullptr, nullptr, [] { forked_after_use = true; });
  }
}

bool in_bad_fork() {
  return forked_after_use;
}

void wait_without_gil(
    std::unique_lock<std::mutex>& lock,
    std::condition_variable& changed,
    const std::function<bool()>& condition) {
  if (condition()) {
    return;
  }
  const bool holds_gil = Py_IsInitialized() != 0 && PyGILState_Check() == 1;
  PyThreadState* state = holds_gil ? PyEval_SaveThread() : nullptr;
  changed.wait(lock, condition);
  if (state != nullptr) {
    // Whoever has the GIL may want our lock: never take the one while holding the other.
    lock.unlock();
    PyEval_RestoreThread(state);
    lock.lock();
  }
}

} // namespace simulated_npu
