// DeviceSwitch: the current device for the length of a scope, over any runtime: CUDA's (cuda/device_guard.h), or one
// that a test brings.
//
//   before          inside      after
//   0, active       1           0
//   0, no context   1           1       restoring 0 would make a context there: half a gigabyte of its memory
#pragma once

namespace kvpage {

// Runtime has current(), set(device), which may throw, and has_context(device) and restore(device), which must not.
template <typename Runtime>
class DeviceSwitch {
 public:
  explicit DeviceSwitch(int device) : previous_(Runtime::current()), changed_(previous_ != device) {
    Runtime::set(device);  // also where it is the current one: binds its context to a new thread
  }
  ~DeviceSwitch() {
    if (changed_ && Runtime::has_context(previous_)) Runtime::restore(previous_);
  }
  DeviceSwitch(const DeviceSwitch&) = delete;
  DeviceSwitch& operator=(const DeviceSwitch&) = delete;

 private:
  const int previous_;
  const bool changed_;
};

}  // namespace kvpage
