// Copies between the host and a device, and within and between devices. All run on the stream that
// is current on the calling thread. A copy takes effect at the end of the time that it takes.
#include "faults.h"
#include "kernels.h"
#include "memory.h"
#include "streams.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

namespace simulated_npu {

namespace {

std::atomic<double> kernel_seconds{0};
std::atomic<double> copy_latency_seconds{0};
std::atomic<double> copy_seconds_per_byte{0};

thread_local int kernels_of_thread = 0;

// One end of a copy.
struct End {
  at::Tensor reachable; // the same elements, where the host reaches them; owns nothing
  std::shared_ptr<void> kept; // what has to outlive the copy; null for pageable memory of the host
};

at::Tensor view_at(void* address, const at::Tensor& like) {
  const auto options = at::TensorOptions().dtype(like.scalar_type()).device(at::kCPU);
  at::Tensor view = at::from_blob(address, like.sizes(), like.strides(), options);
  view._set_conj(like.is_conj());
  view._set_neg(like.is_neg());
  return view;
}

End end_of(const at::Tensor& tensor) {
  void* const address = tensor.data_ptr();
  if (tensor.is_cpu()) {
    return {view_at(address, tensor), pinned_block_of(address)};
  }
  auto block = block_of(address);
  return {view_at(block->at(address), tensor), std::move(block)};
}

bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  return to.is_contiguous() && from.is_contiguous() && to.scalar_type() == from.scalar_type() &&
      to.numel() == from.numel() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

void move_elements(at::Tensor to, const at::Tensor& from) {
  if (is_plain(to, from)) {
    memcpy(to.data_ptr(), from.const_data_ptr(), to.nbytes());
    return;
  }
  const c10::InferenceMode no_autograd;
  at::native::copy_(to, from, false);
}

// What a kernel reads: its stream is idle, so it may be read here and now.
void read_by_kernel(const at::Tensor& from, const at::Tensor& to) {
  move_elements(end_of(to).reachable, end_of(from).reachable);
}

// What a kernel writes. `from` is a temporary that nobody else knows.
void write_by_kernel(const at::Tensor& from, const at::Tensor& to) {
  End target = end_of(to);
  Worker& worker = worker_of(current_stream(to.device().index()));
  if (worker.is_done(worker.latest())) {
    move_elements(target.reachable, from); // the same as enqueueing it, without the detour
    return;
  }
  worker.enqueue({0, [target, from] { move_elements(target.reachable, from); }});
}

void copy_on_stream(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::DeviceIndex device = (from.is_cpu() ? to : from).device().index();
  End source = end_of(from);
  End target = end_of(to);
  const bool within_devices = !from.is_cpu() && !to.is_cpu();
  const bool only_pinned = source.kept != nullptr && target.kept != nullptr;
  const bool waits = !(only_pinned && (non_blocking || within_devices));
  count_call(device, waits ? Call::kSynchronize : Call::kLaunch);

  const c10::Stream stream = current_stream(device);
  const c10::Stream other = to.is_cpu() ? stream : current_stream(to.device().index());
  order(other, stream); // between two devices the current streams of both are in order
  Worker& worker = worker_of(stream);
  const double seconds =
      copy_latency_seconds + copy_seconds_per_byte * static_cast<double>(to.nbytes());
  const Ticket ticket = worker.enqueue(
      {seconds, [source, target] { move_elements(target.reachable, source.reachable); }});
  order(stream, other);
  if (waits) {
    wait_for(device, worker, ticket);
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  const at::Tensor source = from.sizes() == to.sizes() ? from : from.expand_as(to);
  if (!Kernel::is_running()) {
    copy_on_stream(source, to, non_blocking);
  } else if (to.is_cpu()) {
    read_by_kernel(source, to);
  } else {
    write_by_kernel(source, to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

// Tensor.item()
at::Scalar local_scalar(const at::Tensor& tensor) {
  const c10::DeviceIndex device = tensor.device().index();
  count_call(device, Call::kSynchronize);
  Worker& worker = worker_of(current_stream(device));
  wait_for(device, worker, worker.latest());
  return at::_local_scalar_dense(end_of(tensor).reachable);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  if (tensor.numel() == 0) {
    return;
  }
  const auto block = block_of(tensor.data_ptr());
  if (stream != block->owner) {
    block->recorded = true;
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
}

} // namespace

Kernel::Kernel(c10::DeviceIndex device) {
  count_call(device, Call::kLaunch);
  Worker& worker = worker_of(current_stream(device));
  wait_for(device, worker, worker.latest());
  if (kernel_seconds > 0) {
    worker.enqueue({kernel_seconds, [] {}});
  }
  ++kernels_of_thread;
}

Kernel::~Kernel() {
  --kernels_of_thread;
}

bool Kernel::is_running() {
  return kernels_of_thread > 0;
}

void set_kernel_seconds(double seconds) {
  kernel_seconds = seconds;
}

void set_copy_seconds(double latency_seconds, double seconds_per_byte) {
  copy_latency_seconds = latency_seconds;
  copy_seconds_per_byte = seconds_per_byte;
}

} // namespace simulated_npu
