// torch.autocast("npu"): what is computed in the lower precision, and what in float32 whatever its
// inputs are. The choice is torch's own for all devices (ATen/autocast_mode.h), less what a small
// model has no use for.
#include "host.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <vector>

// Declared here since ATen/autocast_mode.h brings every operator along, and half a minute with them.
namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& tensor, DeviceType device_type);
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
} // namespace at::autocast

namespace simulated_npu {

namespace {

constexpr const char* kLowered[] = {
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum",
    "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "scaled_dot_product_attention",
};

constexpr const char* kInFloat32[] = {
    "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "cosine_similarity", "nll_loss", "nll_loss2d", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "binary_cross_entropy_with_logits", "logsumexp",
    "softmax.int", "log_softmax.int", "cumsum", "cumprod", "prod", "sum", "sum.dim_IntList",
};

at::Tensor cast(at::ScalarType dtype, const at::Tensor& tensor) {
  return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kNpu) : tensor;
}

void cast_and_call(at::ScalarType dtype, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = cast(dtype, value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        tensor = cast(dtype, tensor);
      }
      value = tensors;
    }
  }
  op.callBoxed(stack);
}

void lowered(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_and_call(at::autocast::get_autocast_dtype(kNpu), op, stack);
}

void in_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_and_call(at::kFloat, op, stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : kLowered) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&lowered>());
  }
  for (const char* name : kInFloat32) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
  }
}

} // namespace

} // namespace simulated_npu
