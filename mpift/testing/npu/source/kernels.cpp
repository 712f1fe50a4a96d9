// The operators of the device: tensors come from its allocator, views are those of every strided
// device, and all that computes is done by the CPU's kernels, as kernels.h tells.
#include "kernels.h"

#include "faults.h"
#include "hooks.h"
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace simulated_npu {

namespace {

using MaybeTensor = std::optional<at::Tensor>;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---- Tensors ------------------------------------------------------------------------------------

at::Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::DeviceGuard on_device(c10::device_or_default(device));
  return at::detail::empty_generic(
      sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::DeviceGuard on_device(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> plain_offset;
  if (offset.has_value()) {
    plain_offset = offset->expect_int();
  }
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), plain_offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(
    const at::Tensor& self,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

const at::Tensor& resize_(
    const at::Tensor& self,
    c10::SymIntArrayRef sizes,
    std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_source_storage_offset(
    at::Tensor& self,
    at::Storage source,
    c10::SymInt offset,
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides) {
  return at::native::set_storage_meta__symint(self, std::move(source), offset, sizes, strides);
}

// ---- Kernels ------------------------------------------------------------------------------------

std::optional<c10::DeviceIndex> device_of(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) {
    return value.toTensor().device().index();
  }
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined() && tensor.is_privateuseone()) {
        return tensor.device().index();
      }
    }
  }
  return std::nullopt;
}

// Random numbers are drawn by the device's own generators.
void take_generator(c10::IValue& value, const c10::Argument& argument, c10::DeviceIndex device) {
  if (argument.name() != "generator") {
    return;
  }
  if (value.isNone()) {
    value = cpu_generator_of(default_generator(device));
  } else if (value.toGenerator().device().type() == kNpu) {
    value = cpu_generator_of(value.toGenerator());
  }
}

// Every operator that has no kernel of its own here.
void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  std::optional<c10::DeviceIndex> device;
  for (size_t i = first; i < stack->size() && !device.has_value(); ++i) {
    device = device_of((*stack)[i]);
  }
  const Kernel kernel(device.value_or(current_device()));
  for (size_t i = 0; i < arguments.size(); ++i) {
    take_generator((*stack)[first + i], arguments[i], device.value_or(current_device()));
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

MaybeTensor on_cpu(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? MaybeTensor(tensor->cpu()) : std::nullopt;
}

// Convolutions never reach the fallback: torch asks a device for these two of its own.
at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const MaybeTensor& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  const Kernel kernel(input.device().index());
  return at::convolution(
             input.cpu(), weight.cpu(), on_cpu(bias), stride, padding, dilation, transposed,
             output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  const Kernel kernel(input.device().index());
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      gradient.cpu(), input.cpu(), weight.cpu(), at::OptionalIntArrayRef(bias_sizes), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  const auto back = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(input.device()) : tensor;
  };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// Changes the running statistics, which its schema does not say: the fallback would lose that.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input,
    const MaybeTensor& weight,
    const MaybeTensor& bias,
    const MaybeTensor& running_mean,
    const MaybeTensor& running_var,
    bool training,
    double momentum,
    double eps) {
  const Kernel kernel(input.device().index());
  const MaybeTensor mean = on_cpu(running_mean);
  const MaybeTensor variance = on_cpu(running_var);
  const auto [output, save_mean, save_inverse] = at::native_batch_norm(
      input.cpu(), on_cpu(weight), on_cpu(bias), mean, variance, training, momentum, eps);
  if (training && mean.has_value()) {
    running_mean->copy_(*mean);
  }
  if (training && variance.has_value()) {
    running_var->copy_(*variance);
  }
  const at::Device device = input.device();
  return {output.to(device), save_mean.to(device), save_inverse.to(device)};
}

// Takes no generator, and would draw from the CPU's.
std::tuple<at::Tensor, at::Tensor> dropout(
    const at::Tensor& input,
    double probability,
    std::optional<bool> training) {
  if (!training.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const c10::DeviceIndex device = input.device().index();
  const Kernel kernel(device);
  const double kept = 1 - probability;
  const at::Tensor values = input.cpu();
  const at::Tensor mask = at::empty(values.sizes(), values.options().dtype(at::kBool));
  mask.bernoulli_(kept, cpu_generator_of(default_generator(device)));
  const at::Tensor output = values.mul(mask).mul_(kept == 0 ? 0 : 1 / kept);
  return {output.to(input.device()), mask.to(input.device())};
}

// Where torch would compute a kernel of the CPU from smaller ones, and round otherwise.
constexpr const char* kWhole[] = {
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
    "native_group_norm_backward",
};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : kWhole) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
  }
  library.impl("native_batch_norm", &batch_norm);
  library.impl("native_dropout", &dropout);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Tensor", &set_source_tensor);
  library.impl("set_.source_Storage", &set_source_storage);
  library.impl("set_.source_Storage_storage_offset", &set_source_storage_offset);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

} // namespace

} // namespace simulated_npu
