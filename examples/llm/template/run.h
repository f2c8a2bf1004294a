// Running a chat template: its statements and expressions, within limits of time, depth and size.
#pragma once

#include <ctime>
#include <deque>

#include "template/values.h"

namespace llm {
namespace jinja {

struct Arguments {
  std::vector<Value> values;
  std::vector<std::string> names;  // "": by place
};

class Run : public Values {
 public:
  Run(std::time_t time) : time_(time) { scopes_.emplace_back(); }

  void set(const std::string& name, Value value) {
    work_ += int64_t(scopes_.back().names.size());
    for (auto& item : scopes_.back().names) {
      if (item.first == name) return void(item.second = std::move(value));
    }
    scopes_.back().names.emplace_back(name, std::move(value));
  }

  enum Flow { on, left, again };
  Flow run(const Node& node, Text& out) {
    const Deeper deeper(*this, node.line);
    switch (node.kind) {
      case Node::body:
        for (const NodePtr& part : node.parts) {
          if (const Flow flow = run(*part, out); flow != on) return flow;
        }
        return on;
      case Node::print: append(node.line, out, text_of(node.line, evaluate(*node.parts[0]))); return on;
      case Node::branch:
        for (size_t i = 0; i < node.parts.size(); i += 2) {
          if (i + 1 == node.parts.size()) return run(*node.parts[i], out);
          if (truth(evaluate(*node.parts[i]))) return run(*node.parts[i + 1], out);
        }
        return on;
      case Node::repeat: return repeat(node, out);
      case Node::assign: {
        const Value value = evaluate(*node.parts[0]);
        if (node.words.size() == 1) check_kept(node.line, value);
        if (node.word.empty()) return assign(node, node.words, value), on;
        const Value* const space = lookup(node.word);
        if (space == nullptr || space->kind != Value::space) fail(node.line, "'" + node.word + "' is no namespace");
        if (value.kind == Value::space) fail(node.line, "a namespace within a namespace is not supported");
        put(*space->attributes, wide(node.words[0]), value);
        return on;
      }
      case Node::capture: {
        Text text;
        scopes_.push_back({});
        run(*node.parts[0], text);
        scopes_.pop_back();
        set(node.words[0], made(node.line, std::move(text)));
        return on;
      }
      case Node::define: {
        if (scopes_.size() > 1) fail(node.line, "a macro within a loop or a macro is not supported");
        Value macro = Value::of(wide(node.word), Value::macro);
        macro.body = &node;
        set(node.word, macro);
        return on;
      }
      case Node::generation: {
        scopes_.push_back({});
        const Flow flow = run(*node.parts[0], out);
        scopes_.pop_back();
        return flow;
      }
      case Node::leave: return left;
      case Node::next: return again;
      default: fail(node.line, "an expression where a statement should be");
    }
  }

 private:
  struct Loop {
    const List* items;
    size_t at;
  };
  struct Scope {
    std::vector<std::pair<std::string, Value>> names;
    const Loop* loop = nullptr;
  };
  struct Deeper {
    Deeper(Run& run, int line) : depth(run.depth_) {
      run.spend(line, kNodeWork);
      if (++depth > kCalls) fail(line, "it is nested too deep");
    }
    ~Deeper() { --depth; }
    int& depth;
  };

  const Value* lookup(const std::string& name) const {
    for (size_t i = scopes_.size(); i-- > base_;) {
      for (const auto& item : scopes_[i].names) {
        if (item.first == name) return &item.second;
      }
    }
    if (base_ > 0) {
      for (const auto& item : scopes_[0].names) {
        if (item.first == name) return &item.second;
      }
    }
    return nullptr;
  }
  void assign(const Node& node, const std::vector<std::string>& names, const Value& value) {
    if (names.size() == 1) return set(names[0], value);
    const List parts = elements(node.line, value);
    if (parts.size() != names.size())
      fail(node.line, std::to_string(parts.size()) + " values for " + std::to_string(names.size()) + " names");
    for (size_t i = 0; i < names.size(); ++i) set(names[i], parts[i]);
  }

  Flow repeat(const Node& node, Text& out) {
    List items = elements(node.line, evaluate(*node.parts[0]));
    if (node.parts[1] != nullptr) {
      List some;
      for (const Value& item : items) {
        scopes_.push_back({});
        assign(node, node.words, item);
        if (truth(evaluate(*node.parts[1]))) some.push_back(item);
        scopes_.pop_back();
      }
      items = some;
    }
    Flow flow = on;
    Loop loop{&items, 0};
    for (; loop.at < items.size() && flow != left; ++loop.at) {
      scopes_.push_back({{}, &loop});
      assign(node, node.words, items[loop.at]);
      flow = run(*node.parts[2], out);
      scopes_.pop_back();
    }
    if (items.empty() && node.parts[3] != nullptr) {
      scopes_.push_back({});
      flow = run(*node.parts[3], out);
      scopes_.pop_back();
      return flow;
    }
    return on;
  }
  Value loop_attribute(int line, const std::string& name, const Arguments* call) {
    const Loop* loop = nullptr;
    for (size_t i = scopes_.size(); i-- > base_ && loop == nullptr;) loop = scopes_[i].loop;
    if (loop == nullptr) fail(line, "'loop' outside of a loop");
    const auto at = int64_t(loop->at), n = int64_t(loop->items->size());
    if (call != nullptr) {
      if (name != "cycle" || call->values.empty()) fail(line, "'loop." + shown(name) + "(...)' is not supported");
      return call->values[loop->at % call->values.size()];
    }
    if (name == "first") return Value::of(at == 0);
    if (name == "last") return Value::of(at == n - 1);
    if (name == "previtem") return at > 0 ? (*loop->items)[loop->at - 1] : nothing("loop.previtem");
    if (name == "nextitem") return at < n - 1 ? (*loop->items)[loop->at + 1] : nothing("loop.nextitem");
    const std::pair<const char*, int64_t> numbers[] = {
        {"index", at + 1}, {"index0", at}, {"revindex", n - at}, {"revindex0", n - at - 1}, {"length", n}};
    for (const auto& number : numbers) {
      if (name == number.first) return Value::of(Value::integer, number.second);
    }
    fail(line, "'loop." + shown(name) + "' is not supported");
  }

  Value slice(const Node& node) {
    const Value of = evaluate(*node.parts[0]);
    if (of.kind != Value::list && of.kind != Value::text) wrong(node.line, "a slice", of);
    check_indexed(node.line, of);
    int64_t bounds[3] = {0, 0, 1};
    bool given[3] = {};
    for (int i = 0; i < 3; ++i) {
      if (node.parts[size_t(i) + 1] == nullptr) continue;
      const Value v = evaluate(*node.parts[size_t(i) + 1]);
      if (v.kind == Value::none) continue;
      if (!is_number(v)) wrong(node.line, "a slice by the value", v);
      bounds[i] = v.n, given[i] = true;
    }
    const int64_t n = length(node.line, of), step = bounds[2];
    if (step == 0) fail(node.line, "a slice of step 0");
    const auto bound = [&](int i, int64_t otherwise) {
      const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
      return !given[i] ? otherwise : std::min(high, std::max(low, bounds[i] < 0 ? bounds[i] + n : bounds[i]));
    };
    const int64_t from = bound(0, step < 0 ? n - 1 : 0), to = bound(1, step < 0 ? -1 : n);
    List list;
    Text text;
    for (int64_t i = from; step < 0 ? i > to : i < to; i += step) {
      if (of.kind == Value::list) list.push_back((*of.elements)[size_t(i)]);
      else text += (*of.chars)[size_t(i)];
      if (step > n || step < -n) break;
    }
    return of.kind == Value::list ? list_of(node.line, std::move(list), of.n) : made(node.line, std::move(text));
  }

  // ---- expressions

  Value evaluate(const Node& node) {
    const Deeper deeper(*this, node.line);
    switch (node.kind) {
      case Node::constant: return node.value;
      case Node::name: return name(node);
      case Node::make_list: {
        List list;
        for (const NodePtr& part : node.parts) list.push_back(evaluate(*part));
        return list_of(node.line, std::move(list), node.word.empty() ? Value::plain : Value::tuple);
      }
      case Node::make_dict: {
        Dict dict;
        for (size_t i = 0; i < node.parts.size(); i += 2) {
          const Value key = evaluate(*node.parts[i]);
          if (key.kind != Value::text) wrong(node.line, "a dict with the key", key);
          spend(node.line, int64_t(dict.size()));
          put(dict, *key.chars, evaluate(*node.parts[i + 1]));
        }
        return dict_of(node.line, std::move(dict));
      }
      case Node::attribute:
      case Node::item: {
        const bool by_name = node.kind == Node::attribute;
        if (is_loop(*node.parts[0])) {
          return loop_attribute(node.line, by_name ? node.word : narrow(text_of(node.line, evaluate(*node.parts[1]))),
                                nullptr);
        }
        const Value of = evaluate(*node.parts[0]);
        return by_name ? attribute(node.line, of, node.word) : item(node.line, of, evaluate(*node.parts[1]));
      }
      case Node::slice: return slice(node);
      case Node::call: return call(node);
      case Node::filter: return filter(node.line, node.word, evaluate(*node.parts[0]), arguments(node));
      case Node::test: return Value::of(test(node.line, node.word, evaluate(*node.parts[0]), arguments(node)));
      case Node::inverse: return Value::of(!truth(evaluate(*node.parts[0])));
      case Node::compare: {
        Value left = evaluate(*node.parts[0]);
        for (size_t i = 0; i < node.words.size(); ++i) {
          const Value right = evaluate(*node.parts[i + 1]);
          if (!compare(node.line, node.words[i], left, right)) return Value::of(false);
          left = right;
        }
        return Value::of(true);
      }
      case Node::binary: {
        const Value left = evaluate(*node.parts[0]);
        if (node.word == "or" || node.word == "and")
          return truth(left) == (node.word == "or") ? left : evaluate(*node.parts[1]);
        const Value right = evaluate(*node.parts[1]);
        if (node.word == "~") return made(node.line, text_of(node.line, left) + text_of(node.line, right));
        return arithmetic(node.line, node.word, left, right);
      }
      case Node::choose:
        if (truth(evaluate(*node.parts[0]))) return evaluate(*node.parts[1]);
        return node.parts[2] != nullptr ? evaluate(*node.parts[2]) : nothing("the other case");
      default: fail(node.line, "a statement where an expression should be");
    }
  }
  bool is_loop(const Node& node) const {
    return node.kind == Node::name && node.word == "loop" && lookup("loop") == nullptr;
  }
  Value name(const Node& node) {
    if (const Value* const found = lookup(node.word)) return *found;
    if (is_loop(node)) fail(node.line, "'loop' without an attribute is not supported");
    for (const char* known : {"range", "namespace", "raise_exception", "strftime_now"}) {
      if (node.word == known) return Value::of(wide(node.word), Value::function);
    }
    for (const char* known : {"cycler", "dict", "joiner", "lipsum", "self", "caller", "varargs", "kwargs"}) {
      if (node.word == known) fail(node.line, "'" + node.word + "' is not supported");
    }
    return nothing(node.word);
  }
  // ---- calls

  Arguments arguments(const Node& node) {
    Arguments out;
    for (size_t i = 1; i < node.parts.size(); ++i) out.values.push_back(evaluate(*node.parts[i]));
    out.names = node.words;
    return out;
  }
  // The arguments in the order of their names; those that are not given are undefined, and say so.
  std::vector<Value> bind(int line, const std::string& what, const Arguments& given,
                          const std::vector<std::string>& names, size_t least = 0) {
    std::vector<Value> out(names.size(), Value::of(Value::undefined, kNotGiven));
    for (size_t i = 0; i < given.values.size(); ++i) {
      const size_t at =
          given.names[i].empty() ? i : size_t(std::find(names.begin(), names.end(), given.names[i]) - names.begin());
      if (at >= names.size() || !is_missing(out[at]))
        fail(line, "'" + shown(what) + "' with " +
                       (given.names[i].empty() ? "so many arguments" : "the argument '" + shown(given.names[i]) + "'") +
                       " is not supported");
      out[at] = given.values[i];
    }
    for (size_t i = 0; i < least; ++i) {
      if (is_missing(out[i])) fail(line, "'" + shown(what) + "' without the argument '" + names[i] + "'");
    }
    return out;
  }

  Value call(const Node& node) {
    const Node& callee = *node.parts[0];
    if (callee.kind == Node::attribute) {
      if (is_loop(*callee.parts[0])) {
        const Arguments given = arguments(node);
        return loop_attribute(node.line, callee.word, &given);
      }
      const Value of = evaluate(*callee.parts[0]);
      if (of.kind == Value::text) return text_method(node.line, callee.word, of, arguments(node));
      if (of.kind == Value::dict) return dict_method(node.line, callee.word, of, arguments(node));
      wrong(node.line, "the method '" + shown(callee.word) + "'", of);
    }
    const Value of = evaluate(callee);
    if (of.kind == Value::macro) return call_macro(node.line, *of.body, arguments(node));
    if (of.kind != Value::function) wrong(node.line, "a call", of);
    return function(node.line, narrow(*of.chars), arguments(node));
  }
  Value call_macro(int line, const Node& macro, const Arguments& given) {
    const std::vector<Value> values = bind(line, macro.word, given, macro.words);
    const size_t base = base_;
    base_ = scopes_.size();
    scopes_.push_back({});
    for (const Value& value : values) check_kept(line, value);
    for (size_t i = 0; i < values.size(); ++i) {
      const NodePtr& otherwise = macro.parts[i + 1];
      set(macro.words[i], !is_missing(values[i]) ? values[i]
                          : otherwise != nullptr ? evaluate(*otherwise)
                                                 : nothing(macro.words[i]));
    }
    Text text;
    run(*macro.parts[0], text);
    scopes_.pop_back();
    base_ = base;
    return Value::of(std::move(text));
  }

  // filters.cpp: functions, methods, filters and tests that a template may name.
  Value function(int line, const std::string& name, const Arguments& given);
  template <class F>
  Value cased(int line, const Text& text, const F& upper);
  Value joined(int line, const List& list, const Text& between);
  Value strip(int line, const std::string& name, const Text& text, const Arguments& given);
  Value starts_or_ends(int line, const std::string& name, const Text& text, const Arguments& given);
  Value split(int line, const Text& text, const Arguments& given);
  Value replace(int line, const Text& text, const Arguments& given);
  Value text_method(int line, const std::string& name, const Value& of, const Arguments& given);
  Value dict_method(int line, const std::string& name, const Value& of, const Arguments& given);
  void write_json(int line, Text& out, const Value& v, int64_t indent, int64_t depth);
  Value path(int line, Value v, const std::string& names);
  Value selected(int line, const std::string& name, const Value& of, const Arguments& given);
  Value mapped(int line, const Value& of, Arguments given);
  Value filter(int line, const std::string& name, const Value& of, Arguments given);
  bool test(int line, const std::string& name, const Value& of, const Arguments& given);

  std::vector<Scope> scopes_;
  size_t base_ = 0;  // of the macro that is running; it sees the outermost scope besides
  std::deque<Dict> spaces_;
  std::time_t time_;
  int depth_ = 0;
};

}  // namespace jinja
}  // namespace llm
