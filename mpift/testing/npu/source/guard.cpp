// What c10 asks of a device: the current device and stream, and events. Through it torch.Stream,
// torch.Event, torch.accelerator and the autograd engine work.
#include "faults.h"
#include "host.h"
#include "memory.h"
#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>

namespace simulated_npu {

namespace {

double milliseconds_now() {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since_start).count();
}

// One recording of an event. An event that is recorded again gets a new one; those who wait for the
// old one are not concerned.
struct Recording {
  Worker* worker = nullptr;
  Ticket ticket = 0;
  c10::Stream stream;
  std::atomic<double> milliseconds{0}; // when the stream came by

  explicit Recording(const c10::Stream& stream) : stream(stream) {}
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Recording> latest;
};

// Null for an event that was never recorded: it counts as done.
std::shared_ptr<Recording> recording_of(void* event) {
  if (event == nullptr) {
    return nullptr;
  }
  auto* const own = static_cast<Event*>(event);
  std::lock_guard<std::mutex> lock(own->mutex);
  return own->latest;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kNpu;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Device getDevice() const override {
    return {kNpu, current_device()};
  }

  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      set_current_device_unchecked(device.index());
    }
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(resolved(device.index()));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(resolved(device.index()));
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return new_stream(resolved(device.index()));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return new_stream(resolved(device.index()));
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }

  bool queryStream(const c10::Stream& stream) const override {
    raise_if_failed(stream.device_index(), Call::kLaunch);
    Worker& worker = worker_of(stream);
    return worker.is_done(worker.latest());
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    count_call(stream.device_index(), Call::kSynchronize);
    Worker& worker = worker_of(stream);
    wait_for(stream.device_index(), worker, worker.latest());
  }

  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const c10::DeviceIndex device = resolved(index);
    count_call(device, Call::kSynchronize);
    wait_for_all(device);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream)
      const override {
    if (pointer.get() == nullptr) {
      return;
    }
    const auto block = block_of(pointer.get());
    if (stream != block->owner) {
      block->recorded = true;
    }
  }

  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex /*device*/,
      const c10::EventFlag /*flag*/) const override {
    raise_if_failed(stream.device_index(), Call::kLaunch);
    if (*event == nullptr) {
      *event = new Event;
    }
    auto recording = std::make_shared<Recording>(stream);
    recording->worker = &worker_of(stream);
    recording->ticket = recording->worker->enqueue(
        {0, [recording] { recording->milliseconds = milliseconds_now(); }});
    auto* const own = static_cast<Event*>(*event);
    std::lock_guard<std::mutex> lock(own->mutex);
    own->latest = std::move(recording);
  }

  void block(void* event, const c10::Stream& stream) const override {
    const auto recording = recording_of(event);
    raise_if_failed(stream.device_index(), Call::kLaunch);
    if (recording == nullptr || recording->stream == stream) {
      return; // a stream is in order with itself
    }
    worker_of(stream).enqueue({0, [recording] { recording->worker->wait(recording->ticket); }});
  }

  bool queryEvent(void* event) const override {
    const auto recording = recording_of(event);
    if (recording == nullptr) {
      return true;
    }
    raise_if_failed(recording->stream.device_index(), Call::kLaunch);
    return recording->worker->is_done(recording->ticket);
  }

  void synchronizeEvent(void* event) const override {
    const auto recording = recording_of(event);
    if (recording == nullptr) {
      return;
    }
    const c10::DeviceIndex device = recording->stream.device_index();
    count_call(device, Call::kSynchronize);
    wait_for(device, *recording->worker, recording->ticket);
  }

  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    const auto from = recording_of(first);
    const auto to = recording_of(second);
    TORCH_CHECK(
        from != nullptr && to != nullptr,
        "both events must be recorded before the time between them is asked for");
    TORCH_CHECK(
        from->worker->is_done(from->ticket) && to->worker->is_done(to->ticket),
        "both events must be completed before the time between them is asked for: synchronize()");
    return to->milliseconds - from->milliseconds;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

} // namespace simulated_npu
