// The device guard's logic over a runtime that is played: a log of its calls, for tests/native/test_device_switch.py.
#include "../../../csrc/cuda/device_switch.h"

#include <stdexcept>
#include <string>

namespace {

struct Played {
  static inline int device = 0;
  static inline bool active[4] = {};
  static inline int failing = -1;  // the device that cannot be set
  static inline std::string log;

  static int current() { return device; }
  static void set(int wanted) {
    if (wanted == failing) throw std::runtime_error("set fails");
    log += "set " + std::to_string(wanted) + ";";
    device = wanted;
    active[wanted] = true;  // as cudaSetDevice does from CUDA 12 on
  }
  static void restore(int wanted) noexcept {
    log += "restore " + std::to_string(wanted) + ";";
    device = wanted;
    active[wanted] = true;
  }
  static bool has_context(int wanted) noexcept { return active[wanted]; }
};

}  // namespace

// Enters a scope on `device` from `before`. `actives` has a bit for each device that has a context. Writes the calls,
// then the devices that have one afterwards, and returns the current device; -1 if the scope was not entered.
extern "C" int play_device_switch(int before, int device, int actives, int failing, char* out, int num_chars) {
  Played::device = before;
  Played::failing = failing;
  Played::log.clear();
  for (int i = 0; i < 4; ++i) Played::active[i] = (actives >> i) & 1;
  bool entered = true;
  try {
    const kvpage::DeviceSwitch<Played> guard(device);
    Played::log += "inside " + std::to_string(Played::device) + ";";
  } catch (const std::runtime_error&) {
    entered = false;
  }
  for (int i = 0; i < 4; ++i) Played::log += Played::active[i] ? '1' : '0';
  Played::log.copy(out, static_cast<size_t>(num_chars) - 1);
  return entered ? Played::device : -1;
}
