// Where a model computes: the CPU, or a GPU. Memory, copies, and the calls for it. What runs on either is the same
// code: model.cpp.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/ops.h"
#include "text.h"

namespace llm {

// Calls that are made again and again with the same arguments: a captured graph on a GPU.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual void replay() = 0;
};

// The calls themselves.
class Again : public Recording {
 public:
  explicit Again(std::function<void()> calls) : calls_(std::move(calls)) {}
  void replay() override { calls_(); }

 private:
  std::function<void()> calls_;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual bool is_host() const = 0;           // memory is the host's: files that are mapped can be used where they are
  virtual size_t free_bytes() const = 0;
  // The same, of which so many bytes of files that are mapped are to be taken off yet: addresses they have already.
  virtual size_t free_bytes_with(size_t) const { return free_bytes(); }
  virtual void* allocate(size_t bytes) = 0;   // at a multiple of 256 bytes, zeroed; null if there is no room
  virtual void release(void* p) = 0;
  virtual void* allocate_shared(size_t bytes) = 0;  // that host and device see at the same address, zeroed
  virtual void release_shared(void* p) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;  // waits for the calls before
  virtual void synchronize() = 0;
  virtual bool idle() = 0;            // whether all calls have ended
  virtual int64_t chunk() const = 0;  // so many tokens of a prompt keep it busy
  virtual int ahead() const = 0;      // so many steps are asked for before the first one's result is looked at
  virtual std::unique_ptr<Recording> record(const std::function<void()>& calls) = 0;

  virtual const RowCalls& rows() const = 0;
  virtual const ProductCalls* products(Type weights) const = 0;  // null if they are not compiled in
  virtual const AttendCalls* attend(Type cache) const = 0;
  // Null where there is none.
  virtual const WalkCalls* walk(Type) const { return nullptr; }
  const Place& place() const { return place_; }

 protected:
  Place place_;
};

// threads: 0 for one on each core that the process may use, by affinity and by its container's quota.
std::unique_ptr<Device> make_cpu(int threads);
// So many threads, which may be 0 in the same way.
int threads_of(int given);
// How many cores these CPUs belong to. siblings(cpu) lists all CPUs of its core as Linux does, "0,64" or "0-1" say; 0
// if what it gives is no such list, or does not have the CPU in it.
int count_cores(const std::vector<int>& cpus, const std::function<std::string(int cpu)>& siblings);
// The bytes of memory that are left for the process: of the machine, or of its container's limit if that is less. What
// files are cached in counts as left. `root`: where /proc and /sys are.
size_t memory_left(const std::string& root);
// The activations have the first of these types that is compiled in; threads convert weights. Null, and why, if there
// is no GPU.
std::unique_ptr<Device> make_gpu(const std::vector<Type>& activations, int threads, std::string& why);

// The types for which a device has something, as a list for people.
std::string names_of(const std::function<bool(Type)>& has);

// Memory of a device.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device& device, size_t bytes, const std::string& what, bool shared = false)
      : device_(&device),
        bytes_(bytes),
        p_(shared ? device.allocate_shared(bytes > 0 ? bytes : 1) : device.allocate(bytes > 0 ? bytes : 1)),
        shared_(shared),
        what_(what) {
    if (p_ == nullptr)
      throw Error("no room for " + std::to_string(bytes) + " bytes of " + what + " (" +
                  std::to_string(device.free_bytes()) + " are free)");
  }
  ~Buffer() {
    if (p_ != nullptr) shared_ ? device_->release_shared(p_) : device_->release(p_);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept { return swap(other), *this; }

  template <class T = void>
  T* as() const { return static_cast<T*>(p_); }
  size_t bytes() const { return bytes_; }
  void upload(const void* from, size_t bytes, size_t at = 0) {
    check(bytes, at);
    device_->upload(static_cast<char*>(p_) + at, from, bytes);
  }
  void download(void* to, size_t bytes, size_t at = 0) const {
    check(bytes, at);
    device_->download(to, static_cast<const char*>(p_) + at, bytes);
  }

 private:
  void check(size_t bytes, size_t at) const {
    if (bytes > bytes_ || at > bytes_ - bytes)
      throw Error(std::to_string(bytes) + " bytes at " + std::to_string(at) + " are beyond the " +
                  std::to_string(bytes_) + " bytes of " + (what_.empty() ? "a buffer" : what_));
  }
  void swap(Buffer& other) {
    std::swap(device_, other.device_), std::swap(bytes_, other.bytes_), std::swap(p_, other.p_),
        std::swap(shared_, other.shared_), std::swap(what_, other.what_);
  }
  Device* device_ = nullptr;
  size_t bytes_ = 0;
  void* p_ = nullptr;
  bool shared_ = false;
  std::string what_;
};

}  // namespace llm
