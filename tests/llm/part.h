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
      : cpu_(llm::make_cpu(2)), types_(types), rows_(cpu_->rows()), free_(free) {
    rows_.activations = activations;
    place_ = cpu_->place();
  }
  std::string name() const override { return "a part of the CPU"; }
  bool is_host() const override { return true; }
  size_t free_bytes() const override { return free_; }
  void* allocate(size_t bytes) override { return allocated_ += bytes, cpu_->allocate(bytes); }
  void release(void* p) override { cpu_->release(p); }
  void* allocate_shared(size_t bytes) override { return allocated_ += bytes, cpu_->allocate_shared(bytes); }
  void release_shared(void* p) override { cpu_->release_shared(p); }
  void upload(void* to, const void* from, size_t bytes) override { cpu_->upload(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { cpu_->download(to, from, bytes); }
  void synchronize() override {}
  bool idle() override { return true; }
  int64_t chunk() const override { return 512; }
  int ahead() const override { return 0; }
  std::unique_ptr<llm::Recording> record(const std::function<void()>& calls) override { return cpu_->record(calls); }
  const llm::RowCalls& rows() const override { return rows_; }
  const llm::ProductCalls* products(Type type) const override {
    return types_.count(type) > 0 ? cpu_->products(type) : nullptr;
  }
  const llm::AttendCalls* attend(Type type) const override {
    return type == Type::f32 || types_.count(type) > 0 ? cpu_->attend(type) : nullptr;
  }

  size_t allocated() const { return allocated_; }

 private:
  std::unique_ptr<llm::Device> cpu_;
  size_t allocated_ = 0;
  std::set<Type> types_;
  llm::RowCalls rows_;
  size_t free_;
};

}  // namespace golden
