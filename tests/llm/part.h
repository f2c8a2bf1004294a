// A device that is a part of the CPU.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>

#include "device/device.h"

namespace golden {

using llm::Type;

// The CPU with some of its types, and with so much memory free. activations: only for plans, if they are not fp32.
class Part : public llm::Device {
 public:
  explicit Part(const std::set<Type>& types, Type activations = Type::f32, size_t free = size_t(1) << 30)
      : cpu_(llm::make_cpu(2)), rows_(cpu_->rows()), free_(free) {
    rows_.activations = activations;
    calls_.rows = &rows_;
    for (const Type type : types) calls_.products[int(type)] = cpu_->products(type);
    for (const Type type : types) calls_.attend[int(type)] = cpu_->attend(type);
    calls_.attend[int(Type::f32)] = cpu_->attend(Type::f32);
    place_ = cpu_->place();
  }
  std::string name() const override { return "a part of the CPU"; }
  bool is_host() const override { return true; }
  size_t free_bytes(size_t) const override { return free_; }
  std::shared_ptr<void> allocate(size_t bytes, bool shared) override {
    allocated_ += bytes;
    return cpu_->allocate(bytes, shared);
  }
  void upload(void* to, const void* from, size_t bytes) override { cpu_->upload(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { cpu_->download(to, from, bytes); }
  void synchronize() override {}
  bool idle() override { return true; }
  int64_t chunk() const override { return 512; }
  int ahead() const override { return 0; }
  std::function<void()> record(const std::function<void()>& calls) override { return cpu_->record(calls); }

  size_t allocated() const { return allocated_; }

 private:
  std::unique_ptr<llm::Device> cpu_;
  size_t allocated_ = 0;
  llm::RowCalls rows_;
  size_t free_;
};

}  // namespace golden
