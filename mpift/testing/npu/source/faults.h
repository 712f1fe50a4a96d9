// Errors of a device, injected by tests, in the words of torch_npu and CANN.
#pragma once

#include "streams.h"

#include <c10/core/Device.h>

#include <cstdint>

namespace simulated_npu {

enum class Call { kLaunch, kSynchronize };

struct Fault {
  int code = 0;
  int64_t calls_left = 0; // calls that still succeed
  bool sticky = true; // every call fails from then on, not just one
  bool lost = false; // no restart of the device helps
};

void inject(c10::DeviceIndex device, const Fault& fault);
void clear_faults(c10::DeviceIndex device);

// What a repair in place does: a stopped device fails every call until it is restarted.
void stop(c10::DeviceIndex device);
void restart(c10::DeviceIndex device);

// Counts a call to the device (a kernel, a copy or a synchronization: what a program does in a fixed
// order, unlike its queries), and raises where it is to fail.
void count_call(c10::DeviceIndex device, Call call);

// Raises if the device has failed for good. Counts nothing.
void raise_if_failed(c10::DeviceIndex device, Call call);

// A wait of the host for the device; never ends on one that hangs, raises on one that fails
// meanwhile. Does not count the call.
void wait_for(c10::DeviceIndex device, Worker& worker, Ticket ticket);
void wait_for_all(c10::DeviceIndex device);

} // namespace simulated_npu
