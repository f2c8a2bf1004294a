// Checked access to the fields of a JSON object in a model's files.
#pragma once

#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "text.h"

namespace llm {

// The fields of an object. Each is read with a type and a range, and the object remembers which were read.
class Fields {
 public:
  Fields(const Json& json, std::string what) : json_(json), what_(std::move(what)) {
    if (!json.is_object()) throw Error(what_ + ": not a JSON object");
  }

  const Json* find(const std::string& name) const {
    read_.insert(name);
    const auto at = json_.find(name);
    return at == json_.end() || at->is_null() ? nullptr : &*at;
  }
  bool has(const std::string& name) const { return json_.contains(name); }  // even if it is null
  auto items() const { return json_.items(); }
  // Marks fields as read that change nothing here.
  void ignore(std::initializer_list<const char*> names) const { read_.insert(names.begin(), names.end()); }
  const std::string& what() const { return what_; }
  [[noreturn]] void refuse(const std::string& why) const { throw Error(what_ + ": " + why); }
  [[noreturn]] void refuse(const std::string& name, const std::string& why) const { refuse(shown(name) + ": " + why); }

  // Required fields.
  const Json& at(const std::string& name) const {
    const Json* const value = find(name);
    if (value == nullptr) refuse(name, "missing");
    return *value;
  }
  Fields object(const std::string& name) const { return Fields(at(name), what_ + ": " + shown(name)); }
  const Json& list(const std::string& name) const {
    if (!at(name).is_array()) refuse(name, "not an array");
    return at(name);
  }
  std::string text(const std::string& name) const { return at(name), text(name, ""); }
  int64_t integer(const std::string& name, int64_t low, int64_t high) const {
    return integer_of(name, at(name), low, high);
  }
  // Optional fields.
  int64_t integer(const std::string& name, int64_t low, int64_t high, int64_t otherwise) const {
    const Json* const value = find(name);
    return value == nullptr ? otherwise : integer_of(name, *value, low, high);
  }
  // Empty if the field is missing.
  std::vector<int64_t> integers(const std::string& name, int64_t low, int64_t high) const {
    const Json* const value = find(name);
    std::vector<int64_t> out;
    if (value == nullptr) return out;
    if (!value->is_array()) refuse(name, "not an array");
    for (const Json& x : *value) out.push_back(integer_of(name, x, low, high));
    return out;
  }
  // A token id or a list of them; empty if the field is missing or null.
  std::vector<int64_t> token_ids(const std::string& name) const {
    const Json* const value = find(name);
    if (value == nullptr || value->is_array()) return integers(name, INT64_MIN, INT64_MAX);
    return {integer(name, INT64_MIN, INT64_MAX)};
  }
  double number(const std::string& name, double low, double high, double otherwise) const {
    const Json* const value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_number()) refuse(name, "not a number");
    const double x = value->get<double>();
    if (!(x >= low && x <= high)) refuse(name, concat(x, " is not between ", low, " and ", high));
    return x;
  }
  bool flag(const std::string& name, bool otherwise) const {
    const Json* const value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse(name, "not true or false");
    return value->get<bool>();
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    const Json* const value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) refuse(name, "not a string");
    return value->get<std::string>();
  }
  std::vector<double> numbers(const std::string& name) const {
    std::vector<double> out;
    for (const Json& x : list(name)) {
      if (!x.is_number() || !(x.get<double>() > 0)) refuse(name, "not an array of positive numbers");
      out.push_back(x.get<double>());
    }
    return out;
  }
  // Refuses another value than this one, which this program cannot compute. The field may be missing.
  void must_be(const std::string& name, bool value) const {
    if (flag(name, value) != value) refuse(name, value ? "false is not supported" : "true is not supported");
  }

  // Fields that were not read and are not null.
  std::vector<std::string> unread() const {
    std::vector<std::string> out;
    for (const auto& item : json_.items()) {
      if (read_.count(item.key()) == 0 && !item.value().is_null()) out.push_back(item.key());
    }
    return out;
  }
  // Refuses unread fields that change the computation. These are the fields in `neutral` with another value than there,
  // and fields whose names speak of rotation or scaling, because an error in these shows late, and only in some texts.
  // Of the latter, a scale of 1, a scaling that is off, and a no_... that is false are allowed.
  void refuse_unread(const std::map<std::string, Json>& neutral) const {
    for (const std::string& name : unread()) {
      const Json& value = json_.at(name);
      const auto says = [&](const char* part) { return name.find(part) != std::string::npos; };
      const auto known = neutral.find(name);
      if (known == neutral.end() && !says("rope") && !says("rotary") && !says("scaling")) continue;
      const bool scale = says("scal"), share = says("pct") || says("percent") || says("ratio") || says("factor");
      const bool one = value == 1 && (scale || share), off = value == false && (scale || name.rfind("no_", 0) == 0);
      const bool changes = known != neutral.end() ? value != known->second : !one && !off;
      if (changes) refuse(name, shown(value.dump()) + " is not supported for this architecture");
      ignore({name.c_str()});
    }
  }

 private:
  int64_t integer_of(const std::string& name, const Json& value, int64_t low, int64_t high) const {
    if (!value.is_number_integer()) refuse(name, "not an integer");
    const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(INT64_MAX);
    const int64_t n = huge ? INT64_MAX : value.get<int64_t>();
    if (n < low || n > high) refuse(name, concat(n, " is not between ", low, " and ", high));
    return n;
  }

  const Json& json_;
  std::string what_;
  mutable std::set<std::string> read_;
};

}  // namespace llm
