// The values of a running chat template and what can be done with them, within limits of size and depth.
#pragma once

#include <cstring>

#include "template/node.h"

namespace llm {
namespace jinja {

// names: each with a space before and behind it.
inline bool is_one_of(const char* names, const std::string& name) {
  return std::strstr(names, (" " + name + " ").c_str()) != nullptr;
}
// What Python's dicts have: asking for one of these is not asking for an entry.
inline bool is_dict_method(const std::string& name) {
  return is_one_of(" clear copy fromkeys get items keys pop popitem setdefault update values ", name);
}

class Values {
 public:
  Value list_of(int line, List list, int64_t sort = Value::plain) {
    Value out = Value::of(Value::list, sort);
    for (const Value& value : list) deepen(line, out, value);
    spend(line, int64_t(list.size()));
    out.elements = std::make_shared<const List>(std::move(list));
    return out;
  }
  Value dict_of(int line, Dict dict) {
    Value out = Value::of(Value::dict);
    for (const auto& item : dict) deepen(line, out, item.second);
    spend(line, int64_t(dict.size()));
    out.entries = std::make_shared<const Dict>(std::move(dict));
    return out;
  }

 protected:
  // ---- limits

  void spend(int line, int64_t work) {
    work_ += work;
    if (work_ > kWork) fail(line, "it takes too long, or makes too much");
  }
  void spend_search(int line, const Text& text, const Text& what) {
    spend(line, int64_t(text.size() + text.size() * what.size() / 8));
  }
  void deepen(int line, Value& whole, const Value& part) {
    whole.depth = std::max(whole.depth, part.depth + 1);
    if (whole.depth > kValues) fail(line, "values are nested too deep");
    check_kept(line, part);
    if (part.kind == Value::space) fail(line, "a namespace within a list is not supported");
  }
  static void check_kept(int line, const Value& v) {
    if (v.kind == Value::list && v.n == Value::stream)
      fail(line, "what a filter makes without 'list' behind it cannot be kept");
  }
  void append(int line, Text& to, const Text& more) {
    spend(line, int64_t(more.size()));
    to += more;
  }
  Value made(int line, Text text) {
    spend(line, int64_t(text.size()));
    return Value::of(std::move(text));
  }

  // ---- undefined values, and entries of dicts

  static constexpr int64_t kNotGiven = 1;
  static bool is_missing(const Value& v) { return v.kind == Value::undefined && v.n == kNotGiven; }
  static Value nothing(const std::string& name) { return Value::of(wide(name), Value::undefined); }
  static void put(Dict& dict, const Text& key, const Value& value) {
    for (auto& item : dict) {
      if (is_same(item.first, key)) return void(item.second = value);
    }
    dict.emplace_back(key, value);
  }
  static const Value* get(const Dict& dict, const Text& key) {
    for (const auto& item : dict) {
      if (is_same(item.first, key)) return &item.second;
    }
    return nullptr;
  }

  // ---- what every value can be asked

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
  bool equal(int line, const Value& a, const Value& b) {
    spend(line, a.kind == Value::text ? int64_t(a.chars->size()) : 1);
    if (is_number(a) && is_number(b)) return a.n == b.n;
    if (a.kind != b.kind) return false;
    if (a.kind == Value::text) return is_same(*a.chars, *b.chars);
    if (a.kind == Value::list) {
      return a.n == b.n && std::equal(a.elements->begin(), a.elements->end(), b.elements->begin(), b.elements->end(),
                                      [&](const Value& x, const Value& y) { return equal(line, x, y); });
    }
    if (a.kind == Value::dict) {
      return a.entries->size() == b.entries->size() &&
             std::all_of(a.entries->begin(), a.entries->end(), [&](const auto& item) {
               const Value* const other = get(*b.entries, item.first);
               return other != nullptr && equal(line, item.second, *other);
             });
    }
    return a.kind == Value::undefined || a.kind == Value::none || (a.attributes == b.attributes && a.body == b.body);
  }
  Text text_of(int line, const Value& v) {
    switch (v.kind) {
      case Value::undefined: return {};
      case Value::none: return U"None";
      case Value::boolean: return v.n != 0 ? U"True" : U"False";
      case Value::integer: return wide(std::to_string(v.n));
      case Value::text: return *v.chars;
      default: fail(line, std::string(name_of(v)) + " as a text is not supported");
    }
  }
  static const char* name_of(const Value& v) {
    const char* const names[] = {
        "something undefined", "none",       "true or false", "a number", "a text", "a list", "a dict",
        "a namespace",         "a function", "a macro"};
    return names[v.kind];
  }
  [[noreturn]] void wrong(int line, const std::string& what, const Value& v) {
    fail(line, what + " of " + name_of(v) +
                   (v.kind == Value::undefined && v.chars ? ", '" + shown(narrow(*v.chars)) + "'," : "") +
                   " is not possible or not supported");
  }
  // What a loop goes over.
  List elements(int line, const Value& v) {
    List out;
    if (v.kind == Value::list) out = *v.elements;
    else if (v.kind == Value::text) for (const char32_t c : *v.chars) out.push_back(Value::of(Text(1, c)));
    else if (v.kind == Value::dict) for (const auto& item : *v.entries) out.push_back(Value::of(item.first));
    else if (v.kind != Value::undefined) wrong(line, "a loop over the elements", v);
    spend(line, int64_t(out.size()));
    return out;
  }
  int64_t length(int line, const Value& v) {
    if (v.kind == Value::text) return int64_t(v.chars->size());
    if (v.kind == Value::list && v.n != Value::stream) return int64_t(v.elements->size());
    if (v.kind == Value::dict) return int64_t(v.entries->size());
    if (v.kind != Value::undefined) wrong(line, "the length", v);
    return 0;
  }
  bool contains(int line, const Value& all, const Value& one) {
    if (all.kind == Value::list)
      return std::any_of(all.elements->begin(), all.elements->end(),
                         [&](const Value& v) { return equal(line, v, one); });
    if (all.kind == Value::dict && one.kind == Value::text) return get(*all.entries, *one.chars) != nullptr;
    if (all.kind == Value::text && one.kind == Value::text)
      return spend_search(line, *all.chars, *one.chars), find(*all.chars, *one.chars) != Text::npos;
    if (all.kind != Value::undefined) wrong(line, "'in'", all);
    return false;
  }

  // ---- parts of values

  Value attribute(int line, const Value& of, const std::string& name) {
    if (of.kind == Value::undefined) wrong(line, "the attribute '" + shown(name) + "'", of);
    const bool has_own =
        of.kind == Value::dict ? is_dict_method(name) : of.kind != Value::space && of.kind != Value::none;
    if (name[0] == '_' || has_own) fail(line, "'" + shown(name) + "' of " + name_of(of) + " is not supported here");
    const Value* const found = of.kind == Value::dict    ? get(*of.entries, wide(name))
                               : of.kind == Value::space ? get(*of.attributes, wide(name))
                                                         : nullptr;
    return found != nullptr ? *found : nothing(name);
  }
  void check_indexed(int line, const Value& v) {
    if (v.kind == Value::list && v.n >= Value::view)
      fail(line, "an element of what a filter or a method makes, without 'list' behind it, is not supported");
  }
  Value item(int line, const Value& of, const Value& at) {
    if (of.kind == Value::undefined) wrong(line, "an element", of);
    if (at.kind == Value::text && of.kind == Value::dict) {
      if (const Value* const found = get(*of.entries, *at.chars)) return *found;
    }
    if (at.kind == Value::text)
      return attribute(line, of, at.chars->empty() && of.kind != Value::text ? " " : narrow(*at.chars));
    if (!is_number(at) || (of.kind != Value::list && of.kind != Value::text)) return nothing("an element");
    check_indexed(line, of);
    const int64_t n = length(line, of), i = at.n < 0 ? at.n + n : at.n;
    if (i < 0 || i >= n) return nothing("element " + std::to_string(at.n));
    return of.kind == Value::list ? (*of.elements)[size_t(i)] : Value::of(Text(1, (*of.chars)[size_t(i)]));
  }

  // ---- operators

  bool compare(int line, const std::string& sign, const Value& a, const Value& b) {
    if (sign == "in" || sign == "not in") return contains(line, b, a) == (sign == "in");
    for (const Value* v : {&a, &b}) {
      if (v->kind == Value::list && v->n >= Value::view) wrong(line, "'" + sign + "'", *v);
    }
    if (sign == "==" || sign == "!=") return equal(line, a, b) == (sign == "==");
    const bool texts = a.kind == Value::text && b.kind == Value::text;
    if (!texts && !(is_number(a) && is_number(b))) wrong(line, "'" + sign + "'", is_number(a) ? b : a);
    const auto plain = [](Text t) {
      for (char32_t& c : t) c &= kCharacter;
      return t;
    };
    const int order = texts ? plain(*a.chars).compare(plain(*b.chars)) : a.n < b.n ? -1 : a.n > b.n;
    return sign == "<" ? order < 0 : sign == "<=" ? order <= 0 : sign == ">" ? order > 0 : order >= 0;
  }
  Value arithmetic(int line, const std::string& sign, const Value& a, const Value& b) {
    if (is_number(a) && is_number(b)) {
      int64_t n = 0;
      const bool divides = sign == "//" || sign == "%";
      if (divides && b.n == 0) fail(line, "a division by zero");
      if (divides && b.n == -1)
        return sign == "%" ? Value::of(Value::integer, 0) : arithmetic(line, "-", Value::of(Value::integer, 0), a);
      if (divides) {
        const int64_t rest = a.n % b.n,
                      low = rest != 0 && (rest < 0) != (b.n < 0) ? 1 : 0;  // as Python, towards minus infinity
        return Value::of(Value::integer, sign == "%" ? rest + low * b.n : a.n / b.n - low);
      }
      const bool over = sign == "+"   ? __builtin_add_overflow(a.n, b.n, &n)
                        : sign == "-" ? __builtin_sub_overflow(a.n, b.n, &n)
                        : sign == "*" ? __builtin_mul_overflow(a.n, b.n, &n)
                                      : true;
      if (over) fail(line, "'" + sign + "' of these numbers is not supported");
      return Value::of(Value::integer, n);
    }
    if (sign == "+" && a.kind == Value::text && b.kind == Value::text) return made(line, *a.chars + *b.chars);
    if (sign == "+" && a.kind == Value::list && b.kind == Value::list && a.n == b.n && a.n <= Value::tuple) {
      List all = *a.elements;
      all.insert(all.end(), b.elements->begin(), b.elements->end());
      return list_of(line, std::move(all), a.n);
    }
    wrong(line, "'" + sign + "'", is_number(a) || (a.kind == Value::text && b.kind != Value::text) ? b : a);
  }

  int64_t work_ = 0;  // characters, elements and steps so far
};

}  // namespace jinja
}  // namespace llm
