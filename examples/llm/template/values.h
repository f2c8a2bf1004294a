// The values of a running chat template and their operations, within limits of size and depth.
#pragma once

#include <cstring>

#include "template/node.h"

namespace llm::jinja {

// names: each with a space before and after it.
inline bool is_one_of(const char* names, const std::string& name) {
  if (name.find_first_of(std::string(" \0", 2)) != std::string::npos) return false;
  return std::strstr(names, (" " + name + " ").c_str()) != nullptr;
}

class Values {
 public:
  Value list_of(List list, int64_t sort = Value::plain) {
    Value out = Value::of(Value::list, sort);
    for (const Value& value : list) deepen(out, value);
    spend(list.size());
    out.elements = std::make_shared<const List>(std::move(list));
    return out;
  }
  Value dict_of(Dict dict, Value::Kind kind = Value::dict) {
    Value out = Value::of(kind);
    for (const auto& item : dict) deepen(out, item.second);
    spend(dict.size());
    out.entries = std::make_shared<Dict>(std::move(dict));
    return out;
  }

 protected:
  [[noreturn]] void fail(const std::string& why) const { jinja::fail(line_, why); }

  // ---- limits

  void spend(size_t work) {
    work_ += work;
    if (work_ > kWork) fail("too much time or output");
  }
  void spend_search(const Text& text, const Text& what) { spend(text.size() + text.size() * what.size() / 8); }
  void deepen(Value& whole, const Value& part) const {
    whole.depth = std::max(whole.depth, part.depth + 1);
    if (whole.depth > kValues) fail("values are nested too deep");
    check_kept(part);
    if (part.kind == Value::space) fail("a namespace within a list is not supported");
  }
  void check_kept(const Value& v) const {
    if (v.kind == Value::loop) fail("'loop' without an attribute is not supported");
    if (v.kind == Value::list && v.n == Value::stream)
      fail("the result of a filter needs '| list' before it is stored");
  }
  void append(Text& to, const Text& more) {
    spend(more.size());
    to += more;
  }
  Value made(Text text) {
    spend(text.size());
    return Value::of(std::move(text));
  }

  // ---- undefined values, and entries of dicts

  static constexpr int64_t kNotGiven = 1;
  static bool is_missing(const Value& v) { return v.kind == Value::undefined && v.n == kNotGiven; }
  static Value nothing(const std::string& name) { return Value::of(wide(name), Value::undefined); }
  static Value* get(Dict& dict, const Text& key) {
    const auto at = std::find_if(dict.begin(), dict.end(), [&](const auto& item) { return is_same(item.first, key); });
    return at == dict.end() ? nullptr : &at->second;
  }
  static void put(Dict& dict, const Text& key, const Value& value) {
    if (Value* const old = get(dict, key)) *old = value;
    else dict.emplace_back(key, value);
  }

  // ---- properties of all values

  static bool truth(const Value& v) {
    switch (v.kind) {
      case Value::undefined: case Value::none: return false;
      case Value::boolean: case Value::integer: return v.n != 0;
      case Value::text: return !v.chars->empty();
      case Value::list: return v.n == Value::stream || !v.elements->empty();
      case Value::dict: return !v.entries->empty();
      default: return true;
    }
  }
  static bool is_number(const Value& v) { return v.kind == Value::boolean || v.kind == Value::integer; }
  bool equal(const Value& a, const Value& b) {
    spend(a.kind == Value::text ? a.chars->size() : 1);
    if (is_number(a) && is_number(b)) return a.n == b.n;
    if (a.kind != b.kind) return false;
    if (a.kind == Value::text) return is_same(*a.chars, *b.chars);
    if (a.kind == Value::list) {
      return a.n == b.n && std::equal(a.elements->begin(), a.elements->end(), b.elements->begin(), b.elements->end(),
                                      [&](const Value& x, const Value& y) { return equal(x, y); });
    }
    if (a.kind == Value::dict) {
      return a.entries->size() == b.entries->size() &&
             std::all_of(a.entries->begin(), a.entries->end(), [&](const auto& item) {
               const Value* const other = get(*b.entries, item.first);
               return other != nullptr && equal(item.second, *other);
             });
    }
    return a.kind == Value::undefined || a.kind == Value::none || (a.entries == b.entries && a.body == b.body);
  }
  Text text_of(const Value& v) const {
    switch (v.kind) {
      case Value::undefined: return {};
      case Value::none: return U"None";
      case Value::boolean: return v.n != 0 ? U"True" : U"False";
      case Value::integer: return wide(std::to_string(v.n));
      case Value::text: return *v.chars;
      default: fail("printing " + name_of(v) + " is not supported");
    }
  }
  static std::string name_of(const Value& v) {
    const char* const names[] = {"an undefined value", "none", "a boolean", "an integer", "a string", "a list",
                                 "a dict", "a namespace", "'loop' without an attribute", "a function", "a macro"};
    return names[v.kind];
  }
  [[noreturn]] void wrong(const std::string& what, const Value& v) const {
    fail(what + " of " + name_of(v) +
         (v.kind == Value::undefined && v.chars ? ", '" + shown(narrow(*v.chars)) + "'," : "") + " is not supported");
  }
  // The elements over which a loop goes.
  List elements(const Value& v) {
    List out;
    if (v.kind == Value::list) out = *v.elements;
    else if (v.kind == Value::text) for (const char32_t c : *v.chars) out.push_back(Value::of(Text(1, c)));
    else if (v.kind == Value::dict) for (const auto& item : *v.entries) out.push_back(Value::of(item.first));
    else if (v.kind != Value::undefined) wrong("a loop over the elements", v);
    spend(out.size());
    return out;
  }
  int64_t length(const Value& v) const {
    if (v.kind == Value::text) return int64_t(v.chars->size());
    if (v.kind == Value::list && v.n != Value::stream) return int64_t(v.elements->size());
    if (v.kind == Value::dict) return int64_t(v.entries->size());
    if (v.kind != Value::undefined) wrong("the length", v);
    return 0;
  }
  bool contains(const Value& all, const Value& one) {
    const auto is_one = [&](const Value& v) { return equal(v, one); };
    if (all.kind == Value::list) return std::any_of(all.elements->begin(), all.elements->end(), is_one);
    if (all.kind == Value::dict && one.kind == Value::text) return get(*all.entries, *one.chars) != nullptr;
    if (all.kind == Value::text && one.kind == Value::text)
      return spend_search(*all.chars, *one.chars), find(*all.chars, *one.chars) != Text::npos;
    if (all.kind != Value::undefined) wrong("'in'", all);
    return false;
  }

  // ---- parts of values

  Value attribute(const Value& of, const std::string& name) const {
    if (of.kind == Value::undefined) wrong("the attribute '" + shown(name) + "'", of);
    if (of.kind == Value::loop) return of_loop(of, name);
    // Methods of Python's dicts, which are not entries.
    const bool method = is_one_of(" clear copy fromkeys get items keys pop popitem setdefault update values ", name);
    const bool has_own = of.kind == Value::dict ? method : of.kind != Value::space && of.kind != Value::none;
    if (name[0] == '_' || has_own) fail("'" + shown(name) + "' of " + name_of(of) + " is not supported here");
    const Value* const found = of.entries != nullptr ? get(*of.entries, wide(name)) : nullptr;
    return found != nullptr ? *found : nothing(name);
  }
  Value of_loop(const Value& loop, const std::string& name) const {
    const auto at = loop.n, n = int64_t(loop.elements->size());
    if (name == "first") return Value::of(at == 0);
    if (name == "last") return Value::of(at == n - 1);
    if (name == "previtem") return at > 0 ? (*loop.elements)[size_t(at) - 1] : nothing("loop.previtem");
    if (name == "nextitem") return at < n - 1 ? (*loop.elements)[size_t(at) + 1] : nothing("loop.nextitem");
    const std::map<std::string, int64_t> numbers{
        {"index", at + 1}, {"index0", at}, {"revindex", n - at}, {"revindex0", n - at - 1}, {"length", n}};
    const auto number = numbers.find(name);
    if (number == numbers.end()) fail("'loop." + shown(name) + "' is not supported");
    return Value::of(Value::integer, number->second);
  }
  void check_indexed(const Value& v) const {
    if (v.kind == Value::list && v.n >= Value::view)
      fail("the result of a filter or method needs '| list' before it is indexed");
  }
  Value item(const Value& of, const Value& at) const {
    if (of.kind == Value::undefined) wrong("an element", of);
    if (at.kind == Value::text && of.kind == Value::dict) {
      if (const Value* const found = get(*of.entries, *at.chars)) return *found;
    }
    if (at.kind == Value::text)
      return attribute(of, at.chars->empty() && of.kind != Value::text ? " " : narrow(*at.chars));
    if (!is_number(at) || (of.kind != Value::list && of.kind != Value::text)) return nothing("an element");
    check_indexed(of);
    const int64_t n = length(of), i = at.n < 0 ? at.n + n : at.n;
    if (i < 0 || i >= n) return nothing("element " + std::to_string(at.n));
    return of.kind == Value::list ? (*of.elements)[size_t(i)] : Value::of(Text(1, (*of.chars)[size_t(i)]));
  }

  // ---- operators

  bool compare(const std::string& sign, const Value& a, const Value& b) {
    if (sign == "in" || sign == "not in") return contains(b, a) == (sign == "in");
    for (const Value* v : {&a, &b}) {
      if (v->kind == Value::list && v->n >= Value::view) wrong("'" + sign + "'", *v);
    }
    if (sign == "==" || sign == "!=") return equal(a, b) == (sign == "==");
    const bool texts = a.kind == Value::text && b.kind == Value::text;
    if (!texts && !(is_number(a) && is_number(b))) wrong("'" + sign + "'", is_number(a) ? b : a);
    const int order = texts ? narrow(*a.chars).compare(narrow(*b.chars)) : a.n < b.n ? -1 : a.n > b.n;
    return sign == "<" ? order < 0 : sign == "<=" ? order <= 0 : sign == ">" ? order > 0 : order >= 0;
  }
  Value arithmetic(const std::string& sign, const Value& a, const Value& b) {
    const std::string quoted = "'" + sign + "'";
    if (is_number(a) && is_number(b)) {
      int64_t n = 0;
      if (sign == "//" || sign == "%") {
        if (b.n == 0) fail("a division by zero");
        if (b.n == -1) return sign == "%" ? Value::of(Value::integer) : arithmetic("-", Value::of(Value::integer), a);
        const int64_t rest = a.n % b.n,
                      low = rest != 0 && (rest < 0) != (b.n < 0) ? 1 : 0;  // as in Python, towards minus infinity
        return Value::of(Value::integer, sign == "%" ? rest + low * b.n : a.n / b.n - low);
      }
      const bool over = sign == "+"   ? __builtin_add_overflow(a.n, b.n, &n)
                        : sign == "-" ? __builtin_sub_overflow(a.n, b.n, &n)
                        : sign == "*" ? __builtin_mul_overflow(a.n, b.n, &n)
                                      : true;
      if (over) fail(quoted + " of these numbers is not supported");
      return Value::of(Value::integer, n);
    }
    if (sign == "+" && a.kind == Value::text && b.kind == Value::text) return made(*a.chars + *b.chars);
    if (sign == "+" && a.kind == Value::list && b.kind == Value::list && a.n == b.n && a.n <= Value::tuple) {
      List all = *a.elements;
      all.insert(all.end(), b.elements->begin(), b.elements->end());
      return list_of(std::move(all), a.n);
    }
    wrong(quoted, is_number(a) || (a.kind == Value::text && b.kind != Value::text) ? b : a);
  }

  size_t work_ = 0;  // characters, elements and nodes so far
  int line_ = 0;     // the line of the template that is running
};

}  // namespace llm::jinja
