// What the Python side calls, as the extension module `simulated_npu`.
#include "faults.h"
#include "hooks.h"
#include "host.h"
#include "kernels.h"
#include "memory.h"
#include "streams.h"

#include <torch/csrc/utils/pybind.h>

namespace {

namespace npu = simulated_npu;
using c10::DeviceIndex;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  npu::register_hooks();

  module.def("device_count", [] { return static_cast<int>(npu::device_count()); });
  module.def("current_device", [] { return static_cast<int>(npu::current_device()); });
  module.def("set_device", [](int device) {
    npu::use();
    npu::set_current_device(static_cast<DeviceIndex>(device));
  });
  module.def("in_bad_fork", &npu::in_bad_fork);

  module.def("allocated_bytes", &npu::allocated_bytes);
  module.def("most_allocated_bytes", &npu::most_allocated_bytes);
  module.def("reset_most_allocated_bytes", &npu::reset_most_allocated_bytes);
  module.def("capacity_bytes", &npu::capacity_bytes);
  module.def("set_capacity_bytes", &npu::set_capacity_bytes);

  module.def("default_generator", [](DeviceIndex device) {
    return npu::default_generator(npu::resolved(device));
  });

  module.def("set_kernel_seconds", &npu::set_kernel_seconds);
  module.def("set_copy_seconds", &npu::set_copy_seconds);

  module.def("inject", [](DeviceIndex device, int code, int64_t after, bool sticky, bool lost) {
    npu::inject(device, npu::Fault{code, after, sticky, lost});
  });
  module.def("clear_faults", &npu::clear_faults);
  module.def("stop", &npu::stop);
  module.def("restart", &npu::restart);
  module.def("hang", &npu::hang);
  module.def("close", &npu::close_streams);
}

} // namespace
