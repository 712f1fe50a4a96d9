// What torch asks of a kind of device beyond the guard: its random numbers, and pinned memory.
#pragma once

#include "host.h"

#include <ATen/core/Generator.h>

namespace simulated_npu {

// To be called once, when the backend is loaded.
void register_hooks();

// The device's own generator, a CPU generator with another name on it: it gives the numbers that a
// generator of the CPU with the same seed gives.
const at::Generator& default_generator(c10::DeviceIndex device);

// The generator of the CPU that draws for a generator of the device.
at::Generator cpu_generator_of(const at::Generator& generator);

} // namespace simulated_npu
