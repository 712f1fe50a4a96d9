// How a kernel runs. It is computed by the CPU's kernel, on copies in the host's memory, by the
// thread that launches it; but its results reach the device's memory through the stream:
//
//   - it waits for what its own stream holds, and for no other stream: it sees what a kernel of a
//     device would see in the worst case;
//   - then the stream is busy for the settable time;
//   - then the results appear, so that who reads them from another stream without an event that
//     orders the two reads old numbers.
//
// The launching thread is held up only by its own stream's earlier work, so one kernel a stream is
// under way beside the host.
#pragma once

#include "host.h"

namespace simulated_npu {

class Kernel {
 public:
  explicit Kernel(c10::DeviceIndex device);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Whether this thread is inside one: its copies are then the kernel's reads and writes.
  static bool is_running();
};

void set_kernel_seconds(double seconds);
void set_copy_seconds(double latency_seconds, double seconds_per_byte);

} // namespace simulated_npu
