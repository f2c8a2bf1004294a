// A device on which a model computes, the CPU or a GPU: its memory, copies, graphs, and tables of calls. model.cpp is
// the same for both.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/ops.h"
#include "text.h"

namespace llm {

// The calls for an instruction set of the CPU, or for a type of activations on a GPU. Null: not compiled in.
struct Calls {
  const RowCalls* rows = nullptr;
  const ProductCalls* products[kTypes] = {};
  const AttendCalls* attend[kTypes] = {};
  const WalkCalls* walk[kTypes] = {};
};

// All calls that are compiled in: each add() of RowCalls begins a unit, and the others go to the last unit.
class Units : public std::vector<Calls> {
 public:
  void add(const RowCalls& calls) { push_back({&calls}); }
  void add(const ProductCalls& calls) { back().products[int(calls.weights)] = &calls; }
  void add(const AttendCalls& calls) { back().attend[int(calls.cache)] = &calls; }
  void add(const WalkCalls& calls) { back().walk[int(calls.weights)] = &calls; }
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual bool is_host() const = 0;  // the device's memory is the host's, so mapped files can be used where they are
  // Free memory, from which the caller will subtract `mapped` bytes of mapped files. These have addresses already, so
  // they do not count against a limit of addresses.
  virtual size_t free_bytes(size_t mapped = 0) const = 0;
  // Zeroed memory at a multiple of 256 bytes, or null. shared: host and device see it at the same address.
  virtual std::shared_ptr<void> allocate(size_t bytes, bool shared) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;  // waits for earlier calls
  virtual void synchronize() = 0;
  virtual bool idle() = 0;            // whether all calls have ended
  virtual int64_t chunk() const = 0;  // this many tokens of a prompt keep the device busy
  virtual int ahead() const = 0;      // this many steps are queued ahead of the one whose token is awaited
  // A function that repeats these calls with the same arguments: on a GPU a captured graph.
  virtual std::function<void()> record(const std::function<void()>& calls) = 0;

  const RowCalls& rows() const { return *calls_.rows; }
  const ProductCalls* products(Type weights) const { return calls_.products[int(weights)]; }
  const AttendCalls* attend(Type cache) const { return calls_.attend[int(cache)]; }
  const WalkCalls* walk(Type weights) const { return calls_.walk[int(weights)]; }
  const Place& place() const { return place_; }

 protected:
  Place place_;
  Calls calls_;
};

// threads: 0: one for each core that affinity and the container's quota allow.
std::unique_ptr<Device> make_cpu(int threads);
// The number of threads, where 0 means the same.
int threads_of(int given);
// How many cores these CPUs belong to. siblings(cpu) lists all CPUs of its core in the format of Linux ("0,64", "0-1").
// Returns 0 if a list is not in this format or does not contain the CPU.
int count_cores(const std::vector<int>& cpus, const std::function<std::string(int cpu)>& siblings);
// The bytes of memory that the process can still take: what the machine has left, or the limit of its container if that
// is less. The page cache counts as free. root: where /proc and /sys are.
size_t memory_left(const std::string& root);
// Activations have this type, or the other one of 16 bits if only that is compiled in. threads: that convert weights.
// If there is no GPU, returns null and sets `why`.
std::unique_ptr<Device> make_gpu(Type activations, int threads, std::string& why);

// The names of the types for which has(type) is true, as a list.
std::string names_of(const std::function<bool(Type)>& has);

// An array in the memory of a device.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device& device, int64_t count, const std::string& what, bool shared = false)
      : device_(&device), count_(size_t(count)), what_(what) {
    const size_t bytes = std::max<size_t>(1, count_ * sizeof(T));
    p_ = std::static_pointer_cast<T>(device.allocate(bytes, shared));
    if (p_ == nullptr) throw Error("out of memory: ", bytes, " bytes for ", what, ", ", device.free_bytes(), " free");
  }
  Buffer(Buffer&&) = default;
  Buffer& operator=(Buffer&&) = default;

  operator T*() const { return p_.get(); }
  size_t count() const { return count_; }
  void upload(const T* from, size_t count, size_t at = 0) {
    check(count, at);
    device_->upload(*this + at, from, count * sizeof(T));
  }
  void download(T* to, size_t count, size_t at = 0) const {
    check(count, at);
    device_->download(to, *this + at, count * sizeof(T));
  }

 private:
  void check(size_t count, size_t at) const {
    if (count > count_ || at > count_ - count)
      throw Error(count, " elements at ", at, " exceed the ", count_, " of ", what_);
  }
  Device* device_ = nullptr;
  size_t count_ = 0;
  std::shared_ptr<T> p_;
  std::string what_;
};

}  // namespace llm
