// Streams: first in, first out, each on a thread of its own, so that nothing orders two of them but
// events. A forgotten wait between streams is therefore seen as wrong numbers.
#pragma once

#include "host.h"

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace simulated_npu {

// Number of a task in its stream, counted from 1; with it goes all that was enqueued before.
using Ticket = uint64_t;

struct Task {
  double seconds = 0; // how long the device is busy before the work takes effect
  std::function<void()> work;
};

class Worker {
 public:
  explicit Worker(c10::DeviceIndex device);

  Ticket enqueue(Task task);
  Ticket latest();
  bool is_done(Ticket ticket);

  // Until the task is done or dropped.
  void wait(Ticket ticket);

  // The same, as far as it happens before the deadline.
  void wait_until(std::chrono::steady_clock::time_point deadline);

  // Lets the worker see that the streams are being closed.
  void notify();

  // Drops what is enqueued, and cuts short the time that the running task takes.
  void drop_all();

 private:
  void run();
  bool take(Task& task);
  void finish();

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  Ticket enqueued_ = 0;
  Ticket done_ = 0;
  Ticket dropped_ = 0; // tasks up to this one are not carried out
};

Worker& worker_of(const c10::Stream& stream);

// Streams are of a pool, as torch's are: a new stream may be one that was handed out before.
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);

// `second` goes on only after all that `first` holds by now.
void order(const c10::Stream& first, const c10::Stream& second);

void wait_for_device(c10::DeviceIndex device);
void drop_all_of_device(c10::DeviceIndex device);

// From now on tasks of this device never end, nor does a call that waits for the device.
void hang(c10::DeviceIndex device);
void hang_here_if_hung(c10::DeviceIndex device);

// At the end of the process: what is enqueued is carried out at once, and so is, by the calling
// thread, what comes later. Waits a few seconds at most.
void close_streams();

} // namespace simulated_npu
