#include "faults.h"

#include "host.h"
#include <c10/util/Exception.h>

#include <unistd.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace simulated_npu {

namespace {

constexpr int kForceStop = 107022;

// What torch_npu's messages call them; all other codes go by their number alone.
const std::map<int, std::string>& names() {
  static const auto* const table = new std::map<int, std::string>{
      {507053, "UCE ERROR"},
      {507054, "HBM MULTI BIT ECC ERROR"},
      {507055, "SUSPECT MEM ERROR"},
      {507056, "HCCS LINK ERROR"},
      {507057, "SUSPECT REMOTE ERROR"},
      {kForceStop, "FORCE STOP"},
      {507904, "HCCL OP RETRY FAILED"},
  };
  return *table;
}

struct State {
  std::optional<Fault> fault;
  bool struck = false; // the fault has failed a call
  bool stopped = false;
};

std::mutex mutex;
std::array<State, kMostDevices> states;

[[noreturn]] void raise(c10::DeviceIndex device, int code, Call call) {
  const auto name = names().find(code);
  std::string what;
  if (name != names().end()) {
    what = "NPU function error: " + name->second + ", error code is " + std::to_string(code);
  } else if (call == Call::kSynchronize) {
    what = "ACL stream synchronize failed, error code:" + std::to_string(code);
  } else {
    what = "NPU function error: call acl api failed, error code is " + std::to_string(code);
  }
  TORCH_CHECK(
      false, what, "\n[ERROR] (PID:", getpid(), ", Device:", static_cast<int>(device),
      ", RankID:-1) ERR00100 PTA call acl api failed (simulated)");
}

// The code that every call meets by now, 0 for none.
int standing_code(const State& state) {
  if (state.stopped) {
    return kForceStop;
  }
  return state.struck ? state.fault->code : 0;
}

} // namespace

void inject(c10::DeviceIndex device, const Fault& fault) {
  std::lock_guard<std::mutex> lock(mutex);
  states.at(device).fault = fault;
  states.at(device).struck = false;
}

void clear_faults(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  states.at(device) = State();
}

void stop(c10::DeviceIndex device) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    states.at(device).stopped = true;
  }
  drop_all_of_device(device); // wakes those that wait, and they find the device stopped
}

void restart(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  State& state = states.at(device);
  state.stopped = false;
  if (state.struck && !state.fault->lost) {
    state.fault.reset();
    state.struck = false;
  }
}

void count_call(c10::DeviceIndex device, Call call) {
  use();
  int code = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    State& state = states.at(device);
    code = standing_code(state);
    if (code == 0 && state.fault && state.fault->calls_left-- == 0) {
      code = state.fault->code;
      state.struck = state.fault->sticky;
      if (!state.fault->sticky) {
        state.fault.reset();
      }
    }
  }
  if (code != 0) {
    raise(device, code, call);
  }
}

void raise_if_failed(c10::DeviceIndex device, Call call) {
  use();
  int code = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    code = standing_code(states.at(device));
  }
  if (code != 0) {
    raise(device, code, call);
  }
}

void wait_for(c10::DeviceIndex device, Worker& worker, Ticket ticket) {
  hang_here_if_hung(device);
  worker.wait(ticket);
  raise_if_failed(device, Call::kSynchronize);
}

void wait_for_all(c10::DeviceIndex device) {
  hang_here_if_hung(device);
  wait_for_device(device);
  raise_if_failed(device, Call::kSynchronize);
}

} // namespace simulated_npu
