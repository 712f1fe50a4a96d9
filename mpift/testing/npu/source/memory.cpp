#include "memory.h"

#include "streams.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace simulated_npu {

namespace {

constexpr size_t kRounding = 512; // of torch's caching allocators
constexpr int64_t kUsualCapacity = int64_t(1) << 30;
constexpr int kPoison = 0xFF; // NaN in every floating-point type, -1 in every integer

size_t rounded(size_t size) {
  return (size + kRounding - 1) / kRounding * kRounding;
}

template <class T>
class AddressMap {
 public:
  void add(const std::shared_ptr<T>& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[block->address] = block;
  }

  // Null where the address lies in none.
  std::shared_ptr<T> find(const void* address) {
    const auto* wanted = static_cast<const char*>(address);
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = blocks_.upper_bound(const_cast<char*>(wanted));
    if (next == blocks_.begin()) {
      return nullptr;
    }
    const std::shared_ptr<T>& block = std::prev(next)->second;
    return wanted < block->address + block->size ? block : nullptr;
  }

  std::shared_ptr<T> remove(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(static_cast<char*>(address));
    TORCH_INTERNAL_ASSERT(found != blocks_.end());
    std::shared_ptr<T> block = std::move(found->second);
    blocks_.erase(found);
    return block;
  }

 private:
  std::mutex mutex_;
  std::map<char*, std::shared_ptr<T>> blocks_;
};

AddressMap<Block>& blocks() {
  static auto* const map = new AddressMap<Block>;
  return *map;
}

AddressMap<PinnedBlock>& pinned_blocks() {
  static auto* const map = new AddressMap<PinnedBlock>;
  return *map;
}

struct Usage {
  std::mutex mutex;
  int64_t allocated = 0;
  int64_t most = 0;
  int64_t capacity = kUsualCapacity;
};

Usage& usage(c10::DeviceIndex device) {
  static auto* const of_all = new std::array<Usage, kMostDevices>;
  return of_all->at(device);
}

void take_from(c10::DeviceIndex device, int64_t wanted) {
  Usage& of_device = usage(device);
  std::lock_guard<std::mutex> lock(of_device.mutex);
  TORCH_CHECK_WITH(
      OutOfMemoryError, of_device.allocated + wanted <= of_device.capacity,
      "NPU out of memory. Tried to allocate ", wanted, " bytes (NPU ", static_cast<int>(device),
      "; ", of_device.capacity, " bytes total capacity; ", of_device.allocated,
      " bytes already allocated)");
  of_device.allocated += wanted;
  of_device.most = std::max(of_device.most, of_device.allocated);
}

void give_back_to(c10::DeviceIndex device, int64_t size) {
  Usage& of_device = usage(device);
  std::lock_guard<std::mutex> lock(of_device.mutex);
  of_device.allocated -= size;
}

void free_device_memory(void* address) {
  if (address == nullptr || in_bad_fork()) {
    return;
  }
  std::shared_ptr<Block> block = blocks().remove(address);
  give_back_to(block->owner.device_index(), static_cast<int64_t>(block->size));
  // A caching allocator hands freed memory to the next tensor of its stream at once. Whoever still
  // works on it from another stream, without record_stream(), is to see that: as poison.
  if (block.use_count() > 1 && !block->recorded) {
    worker_of(block->owner).enqueue({0, [block] { memset(block->bytes, kPoison, block->size); }});
  }
}

void free_pinned_memory(void* address) {
  if (address != nullptr && !in_bad_fork()) {
    pinned_blocks().remove(address);
  }
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    use();
    const c10::DeviceIndex index = current_device();
    const c10::Device device(kNpu, index);
    if (size == 0) {
      return {nullptr, nullptr, &free_device_memory, device};
    }
    take_from(index, static_cast<int64_t>(rounded(size)));
    const auto block = std::make_shared<Block>(rounded(size), current_stream(index));
    blocks().add(block);
    return {block->address, block->address, &free_device_memory, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device_memory;
  }

  // Called by clone() of a storage, on the current stream.
  void copy_data(void* to, const void* from, size_t size) const override {
    const auto target = block_of(to);
    const auto source = block_of(from);
    char* const into = target->bytes + (static_cast<char*>(to) - target->address);
    const char* const out_of = source->bytes + (static_cast<const char*>(from) - source->address);
    worker_of(current_stream(target->owner.device_index()))
        .enqueue({0, [=] { memcpy(into, out_of, size + 0 * (target->size + source->size)); }});
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    use();
    const c10::Device device(c10::DeviceType::CPU);
    if (size == 0) {
      return {nullptr, nullptr, &free_pinned_memory, device};
    }
    const auto block = std::make_shared<PinnedBlock>(size);
    pinned_blocks().add(block);
    return {block->address, block->address, &free_pinned_memory, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned_memory;
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    memcpy(to, from, size);
  }
};

DeviceAllocator device_allocator_instance;
PinnedAllocator pinned_allocator_instance;

REGISTER_ALLOCATOR(kNpu, &device_allocator_instance)

} // namespace

Block::Block(size_t size, const c10::Stream& owner) : size(size), owner(owner) {
  void* reserved =
      mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(reserved != MAP_FAILED, "no address range left for a simulated NPU");
  address = static_cast<char*>(reserved);
  bytes = static_cast<char*>(std::aligned_alloc(kRounding, size));
  TORCH_CHECK(bytes != nullptr, "the host has no memory left for a simulated NPU");
}

Block::~Block() {
  munmap(address, size);
  std::free(bytes);
}

PinnedBlock::PinnedBlock(size_t size)
    : address(static_cast<char*>(std::aligned_alloc(kRounding, rounded(size)))), size(size) {
  TORCH_CHECK(address != nullptr, "the host has no memory left to pin: ", size, " bytes wanted");
}

PinnedBlock::~PinnedBlock() {
  std::free(address);
}

std::shared_ptr<Block> block_of(const void* address) {
  std::shared_ptr<Block> block = blocks().find(address);
  TORCH_CHECK(block != nullptr, "address ", address, " is not in the memory of a simulated NPU");
  return block;
}

std::shared_ptr<PinnedBlock> pinned_block_of(const void* address) {
  return in_bad_fork() ? nullptr : pinned_blocks().find(address);
}

c10::Allocator* device_allocator() {
  return &device_allocator_instance;
}

c10::Allocator* pinned_allocator() {
  return &pinned_allocator_instance;
}

int64_t allocated_bytes(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(usage(device).mutex);
  return usage(device).allocated;
}

int64_t most_allocated_bytes(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(usage(device).mutex);
  return usage(device).most;
}

int64_t capacity_bytes(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(usage(device).mutex);
  return usage(device).capacity;
}

void set_capacity_bytes(c10::DeviceIndex device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(usage(device).mutex);
  usage(device).capacity = bytes;
}

void reset_most_allocated_bytes(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(usage(device).mutex);
  usage(device).most = usage(device).allocated;
}

} // namespace simulated_npu
