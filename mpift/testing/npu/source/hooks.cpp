#include "hooks.h"

#include "faults.h"
#include "memory.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

namespace simulated_npu {

namespace {

struct NpuGenerator final : c10::GeneratorImpl {
  NpuGenerator(c10::DeviceIndex device, at::Generator cpu)
      : c10::GeneratorImpl(
            c10::Device(kNpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}

  explicit NpuGenerator(c10::DeviceIndex device)
      : NpuGenerator(device, at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override {
    cpu.set_current_seed(seed);
  }

  uint64_t current_seed() const override {
    return cpu.current_seed();
  }

  uint64_t seed() override {
    return cpu.seed();
  }

  void set_offset(uint64_t /*offset*/) override {
    TORCH_CHECK(false, "a generator of a simulated NPU has no offset");
  }

  uint64_t get_offset() const override {
    TORCH_CHECK(false, "a generator of a simulated NPU has no offset");
  }

  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }

  NpuGenerator* clone_impl() const override {
    return new NpuGenerator(device().index(), cpu.clone());
  }

  at::Generator cpu;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return true;
  }

  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    set_current_device(device);
    return before;
  }

  // Negative means "leave it".
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(resolved(device));
  }

  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<NpuGenerator>(resolved(device));
  }

  at::Device getDeviceFromPtr(void* address) const override {
    return block_of(address)->owner.device();
  }

  bool isPinnedPtr(const void* address) const override {
    return pinned_block_of(address) != nullptr;
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard on_device(storage.device());
    auto* const impl = storage.unsafeGetStorageImpl();
    c10::DataPtr larger = device_allocator()->allocate(size);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept > 0) {
      device_allocator()->copy_data(larger.get(), storage.data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(larger));
    impl->set_nbytes(size);
  }
};

} // namespace

void register_hooks() {
  static auto* const hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* const generators = [] {
    auto* const all = new std::vector<at::Generator>;
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      all->push_back(at::make_generator<NpuGenerator>(index));
    }
    return all;
  }();
  return generators->at(device);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  return static_cast<NpuGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

} // namespace simulated_npu
