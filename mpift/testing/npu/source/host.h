// What every part needs to know of the host: how many devices it plays, whether this process may
// use them, and how to wait without holding up Python.
#pragma once

#include <c10/core/Device.h>

#include <condition_variable>
#include <functional>
#include <mutex>

namespace simulated_npu {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;

// As MPIFT_SIMULATED_NPUS says; 2 where it says nothing.
c10::DeviceIndex device_count();

// The device of this thread.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
void set_current_device_unchecked(c10::DeviceIndex index) noexcept;

// -1 stands for the current device. Raises for a device that there is not.
c10::DeviceIndex resolved(c10::DeviceIndex index);

// To be called before anything is started, allocated or locked: a forked child of a process that
// used a device has none of its threads, and may have inherited locks that nobody will release.
void use();
bool in_bad_fork();

// Waits for the condition; the GIL is released meanwhile, since whoever fulfils the condition, or
// watches over us, may be a Python thread.
void wait_without_gil(
    std::unique_lock<std::mutex>& lock,
    std::condition_variable& changed,
    const std::function<bool()>& condition);

} // namespace simulated_npu
