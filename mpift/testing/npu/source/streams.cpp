#include "streams.h"

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace simulated_npu {

namespace {

constexpr c10::StreamId kDefaultStream = 0;
constexpr c10::StreamId kPoolSize = 32; // torch's number of streams a device and priority

constexpr std::chrono::seconds kClosing{5};

std::atomic<bool> hurried{false}; // nothing takes time any more
std::atomic<bool> closed{false}; // the workers have nothing to do any more
std::array<std::atomic<bool>, kMostDevices> hung{};

thread_local std::array<c10::StreamId, kMostDevices> stream_of_thread{};

// Never destroyed, like all that worker threads touch: they may outlive the end of main().
struct Pool {
  std::mutex mutex;
  std::array<std::array<Worker*, kPoolSize + 1>, kMostDevices> workers{};
  std::array<c10::StreamId, kMostDevices> handed_out{};
};

Pool& pool() {
  static auto* const instance = new Pool;
  return *instance;
}

std::vector<Worker*> workers_of_device(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(pool().mutex);
  std::vector<Worker*> found;
  for (Worker* worker : pool().workers.at(device)) {
    if (worker != nullptr) {
      found.push_back(worker);
    }
  }
  return found;
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, device), id);
}

} // namespace

Worker::Worker(c10::DeviceIndex device) : device_(device) {
  std::thread([this] { run(); }).detach();
}

Ticket Worker::enqueue(Task task) {
  if (closed) {
    task.work();
    return 0; // of no task: whoever waits for it goes on
  }
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
  return ++enqueued_;
}

Ticket Worker::latest() {
  std::lock_guard<std::mutex> lock(mutex_);
  return enqueued_;
}

bool Worker::is_done(Ticket ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= ticket;
}

void Worker::wait(Ticket ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_without_gil(lock, changed_, [&] { return done_ >= ticket; });
}

void Worker::wait_until(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return done_ >= enqueued_; });
}

void Worker::notify() {
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void Worker::drop_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  dropped_ = enqueued_;
  changed_.notify_all();
}

void Worker::run() {
  for (;;) {
    Task task;
    if (take(task)) {
      task.work();
    }
    task.work = nullptr; // what it keeps alive goes before anyone learns that it is done
    finish();
  }
}

// Waits for the next task, and for as long as it takes; false where it is not to be carried out.
bool Worker::take(Task& task) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return !tasks_.empty(); });
  task = std::move(tasks_.front());
  tasks_.pop_front();
  const auto is_dropped = [&] { return dropped_ > done_; };
  if (task.seconds > 0) {
    const std::chrono::duration<double> busy(task.seconds);
    changed_.wait_for(lock, busy, [&] { return is_dropped() || hurried; });
  }
  changed_.wait(lock, [&] { return !hung.at(device_); }); // which never changes back
  return !is_dropped();
}

void Worker::finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++done_;
  changed_.notify_all();
}

Worker& worker_of(const c10::Stream& stream) {
  use();
  std::lock_guard<std::mutex> lock(pool().mutex);
  Worker*& worker = pool().workers.at(stream.device_index()).at(stream.id());
  if (worker == nullptr) {
    worker = new Worker(stream.device_index());
  }
  return *worker;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  use();
  std::lock_guard<std::mutex> lock(pool().mutex);
  const c10::StreamId number = pool().handed_out.at(device)++;
  return stream_of(device, 1 + number % kPoolSize);
}

c10::Stream default_stream(c10::DeviceIndex device) {
  return stream_of(device, kDefaultStream);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, stream_of_thread.at(device));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const c10::Stream before = current_stream(stream.device_index());
  stream_of_thread.at(stream.device_index()) = stream.id();
  return before;
}

void order(const c10::Stream& first, const c10::Stream& second) {
  if (first == second) {
    return;
  }
  Worker& worker = worker_of(first);
  const Ticket ticket = worker.latest();
  worker_of(second).enqueue({0, [&worker, ticket] { worker.wait(ticket); }});
}

void wait_for_device(c10::DeviceIndex device) {
  std::vector<std::pair<Worker*, Ticket>> pending;
  for (Worker* worker : workers_of_device(device)) {
    pending.emplace_back(worker, worker->latest());
  }
  for (const auto& [worker, ticket] : pending) {
    worker->wait(ticket);
  }
}

void drop_all_of_device(c10::DeviceIndex device) {
  for (Worker* worker : workers_of_device(device)) {
    worker->drop_all();
  }
}

void hang(c10::DeviceIndex device) {
  hung.at(device) = true;
}

void hang_here_if_hung(c10::DeviceIndex device) {
  if (!hung.at(device)) {
    return;
  }
  static auto* const mutex = new std::mutex;
  static auto* const never = new std::condition_variable;
  std::unique_lock<std::mutex> lock(*mutex);
  wait_without_gil(lock, *never, [] { return false; });
}

void close_streams() {
  if (in_bad_fork()) {
    return; // no worker lives in this process, and the locks may be taken for ever
  }
  hurried = true;
  const auto deadline = std::chrono::steady_clock::now() + kClosing;
  std::vector<Worker*> alive;
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    const std::vector<Worker*> found = workers_of_device(device);
    if (!hung.at(device)) {
      alive.insert(alive.end(), found.begin(), found.end());
    }
  }
  for (Worker* worker : alive) {
    worker->notify(); // first all: one may wait for another's event
  }
  for (Worker* worker : alive) {
    worker->wait_until(deadline);
  }
  closed = true;
}

} // namespace simulated_npu
