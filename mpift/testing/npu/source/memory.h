// Memory of the devices, which the host can't touch, and pinned memory of the host, which the
// devices copy from and to on their own.
#pragma once

#include "host.h"

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace simulated_npu {

// `address` is what tensors point to: a range that is reserved and may not be read or written, so
// that the host crashes where it would on hardware. The bytes themselves are at `bytes`. A task
// that works on them holds on to the block: it outlives its tensor until the task is done.
struct Block {
  Block(size_t size, const c10::Stream& owner);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Where the host reaches what a tensor has at `inside`.
  char* at(const void* inside) const {
    return bytes + (static_cast<const char*>(inside) - address);
  }

  char* address = nullptr;
  char* bytes = nullptr;
  const size_t size;
  const c10::Stream owner; // the stream that it was allocated on
  std::atomic<bool> recorded{false}; // record_stream() was called on it
};

// Pinned memory of the host; freed only when no task works on it.
struct PinnedBlock {
  explicit PinnedBlock(size_t size);
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  char* address = nullptr;
  const size_t size;
};

// The block that an address lies in. Null where it is no pinned memory; raises where it should be
// of a device and isn't.
std::shared_ptr<Block> block_of(const void* address);
std::shared_ptr<PinnedBlock> pinned_block_of(const void* address);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

int64_t allocated_bytes(c10::DeviceIndex device);
int64_t most_allocated_bytes(c10::DeviceIndex device);
int64_t capacity_bytes(c10::DeviceIndex device);
void set_capacity_bytes(c10::DeviceIndex device, int64_t bytes);
void reset_most_allocated_bytes(c10::DeviceIndex device);

} // namespace simulated_npu
