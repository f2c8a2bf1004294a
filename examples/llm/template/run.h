// Runs a chat template: its statements and expressions, within limits of time, depth and size.
#pragma once

#include <ctime>
#include <optional>

#include "template/values.h"

namespace llm::jinja {

struct Arguments {
  List values;
  std::vector<std::string> names;  // "": a positional argument

  Value take() {  // removes and returns the first one
    const Value out = values[0];
    values.erase(values.begin()), names.erase(names.begin());
    return out;
  }
};

class Run : public Values {
 public:
  explicit Run(std::time_t time) : time_(time) {}

  void set(const std::string& name, Value value) { (scopes_.empty() ? globals_ : scopes_.back())[name] = value; }

  enum Flow { on, left, again };
  Flow run(const Node& node, Text& out) {
    const Deeper deeper(*this, node.line);
    switch (node.kind) {
      case Node::body:
        for (const NodePtr& part : node.parts) {
          if (const Flow flow = run(*part, out); flow != on) return flow;
        }
        return on;
      case Node::print: append(out, text_of(evaluate(*node.parts[0]))); return on;
      case Node::branch:
        for (size_t i = 0; i < node.parts.size(); i += 2) {
          if (i + 1 == node.parts.size()) return run(*node.parts[i], out);
          if (truth(evaluate(*node.parts[i]))) return run(*node.parts[i + 1], out);
        }
        return on;
      case Node::repeat: return repeat(node, out);
      case Node::assign: {
        const Value value = evaluate(*node.parts[0]);
        if (node.words.size() == 1) check_kept(value);
        if (node.word.empty()) return assign(node.words, value), on;
        const Value* const space = lookup(node.word);
        if (space == nullptr || space->kind != Value::space) fail("'" + node.word + "' is not a namespace");
        if (value.kind == Value::space) fail("a nested namespace is not supported");
        put(*space->entries, wide(node.words[0]), value);
        return on;
      }
      case Node::capture: {
        Text text;
        run_inside(*node.parts[0], text);
        set(node.words[0], made(std::move(text)));
        return on;
      }
      case Node::define: {
        if (!scopes_.empty()) fail("a macro inside a loop or macro is not supported");
        Value macro = Value::of(Value::macro);
        macro.body = &node;
        set(node.word, macro);
        return on;
      }
      case Node::generation: return run_inside(*node.parts[0], out);
      case Node::leave: return left;
      case Node::next: return again;
      default: fail("expected a statement");
    }
  }

 private:
  using Scope = std::map<std::string, Value>;
  struct Deeper {
    Deeper(Run& run, int line) : run_(run), before_(run.line_) {
      run.line_ = line;
      run.spend(kNodeWork);
      if (++run.depth_ > kCalls) run.fail("calls are nested too deep");
    }
    ~Deeper() { --run_.depth_, run_.line_ = before_; }

   private:
    Run& run_;
    int before_;
  };

  const Value* lookup(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto at = scope->find(name); at != scope->end()) return &at->second;
    }
    const auto at = globals_.find(name);
    return at != globals_.end() ? &at->second : nullptr;
  }
  void assign(const std::vector<std::string>& names, const Value& value) {
    if (names.size() == 1) return set(names[0], value);
    const List parts = elements(value);
    if (parts.size() != names.size())
      fail(std::to_string(parts.size()) + " values for " + std::to_string(names.size()) + " names");
    for (size_t i = 0; i < names.size(); ++i) set(names[i], parts[i]);
  }
  Flow run_inside(const Node& node, Text& out) {
    scopes_.emplace_back();
    const Flow flow = run(node, out);
    scopes_.pop_back();
    return flow;
  }

  Flow repeat(const Node& node, Text& out) {
    List items = elements(evaluate(*node.parts[0]));
    if (node.parts[1] != nullptr) {
      List some;
      for (const Value& item : items) {
        scopes_.emplace_back();
        assign(node.words, item);
        if (truth(evaluate(*node.parts[1]))) some.push_back(item);
        scopes_.pop_back();
      }
      items = some;
    }
    if (items.empty()) return node.parts[3] != nullptr ? run_inside(*node.parts[3], out) : on;
    Value loop = Value::of(Value::loop);
    loop.elements = std::make_shared<const List>(std::move(items));
    Flow flow = on;
    for (const Value& item : *loop.elements) {
      scopes_.push_back({{"loop", loop}});
      assign(node.words, item);
      flow = run(*node.parts[2], out);
      scopes_.pop_back();
      if (flow == left) break;
      ++loop.n;
    }
    return on;
  }

  Value slice(const Node& node) {
    const Value of = evaluate(*node.parts[0]);
    if (of.kind != Value::list && of.kind != Value::text) wrong("a slice", of);
    check_indexed(of);
    std::optional<int64_t> bounds[3];
    for (size_t i = 0; i < 3; ++i) {
      const Value v = node.parts[i + 1] != nullptr ? evaluate(*node.parts[i + 1]) : Value::of(Value::none);
      if (v.kind != Value::none && !is_number(v)) wrong("a slice by the value", v);
      if (v.kind != Value::none) bounds[i] = v.n;
    }
    const int64_t n = length(of), step = bounds[2].value_or(1);
    if (step == 0) fail("a slice with step 0");
    const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    const auto bound = [&](std::optional<int64_t> at, int64_t otherwise) {
      return !at ? otherwise : std::min(high, std::max(low, *at < 0 ? *at + n : *at));
    };
    const int64_t from = bound(bounds[0], step < 0 ? high : low), to = bound(bounds[1], step < 0 ? low : high);
    List list;
    Text text;
    for (int64_t i = from; step < 0 ? i > to : i < to; i += step) {
      if (of.kind == Value::list) list.push_back((*of.elements)[size_t(i)]);
      else text += (*of.chars)[size_t(i)];
      if (step > n || step < -n) break;
    }
    return of.kind == Value::list ? list_of(std::move(list), of.n) : made(std::move(text));
  }

  // ---- expressions

  Value evaluate(const Node& node) {
    const Deeper deeper(*this, node.line);
    const auto part = [&](size_t i) { return evaluate(*node.parts[i]); };
    switch (node.kind) {
      case Node::constant: return node.value;
      case Node::name: return name(node);
      case Node::make_list: {
        List list;
        for (const NodePtr& element : node.parts) list.push_back(evaluate(*element));
        return list_of(std::move(list), node.word.empty() ? Value::plain : Value::tuple);
      }
      case Node::make_dict: {
        Dict dict;
        for (size_t i = 0; i < node.parts.size(); i += 2) {
          const Value key = part(i);
          if (key.kind != Value::text) wrong("a dict with the key", key);
          spend(dict.size());
          put(dict, *key.chars, part(i + 1));
        }
        return dict_of(std::move(dict));
      }
      case Node::attribute: return attribute(part(0), node.word);
      case Node::item: {
        const Value of = part(0);
        return item(of, part(1));
      }
      case Node::slice: return slice(node);
      case Node::call: return call(node);
      case Node::filter: {
        const Value of = part(0);
        return filter(node.word, of, arguments(node));
      }
      case Node::test: {
        const Value of = part(0);
        return Value::of(test(node.word, of, arguments(node)));
      }
      case Node::inverse: return Value::of(!truth(part(0)));
      case Node::compare: {
        Value left = part(0);
        for (size_t i = 0; i < node.words.size(); ++i) {
          const Value right = part(i + 1);
          if (!compare(node.words[i], left, right)) return Value::of(false);
          left = right;
        }
        return Value::of(true);
      }
      case Node::binary: {
        const Value left = part(0);
        if (node.word == "or" || node.word == "and") return truth(left) == (node.word == "or") ? left : part(1);
        const Value right = part(1);
        return node.word == "~" ? made(text_of(left) + text_of(right)) : arithmetic(node.word, left, right);
      }
      case Node::choose:
        if (truth(part(0))) return part(1);
        return node.parts[2] != nullptr ? part(2) : nothing("the other case");
      default: fail("expected an expression");
    }
  }
  Value name(const Node& node) const {
    if (const Value* const found = lookup(node.word)) return *found;
    if (node.word == "loop") fail("'loop' outside of a loop");
    if (is_one_of(" cycler dict joiner lipsum self caller varargs kwargs ", node.word))
      fail("'" + node.word + "' is not supported");
    const bool function = is_one_of(" range namespace raise_exception strftime_now ", node.word);
    return Value::of(wide(node.word), function ? Value::function : Value::undefined);
  }

  // ---- calls

  Arguments arguments(const Node& node) {
    Arguments out{{}, node.words};
    for (size_t i = 1; i < node.parts.size(); ++i) out.values.push_back(evaluate(*node.parts[i]));
    return out;
  }
  // The arguments in the order of `names`; those that are not given are undefined, with a name that says so.
  List bind(const std::string& what, const Arguments& given, const std::vector<std::string>& names, size_t least = 0) {
    List out(names.size(), Value::of(Value::undefined, kNotGiven));
    for (size_t i = 0; i < given.values.size(); ++i) {
      const std::string& name = given.names[i];
      const size_t at = name.empty() ? i : size_t(std::find(names.begin(), names.end(), name) - names.begin());
      if (at >= names.size() || !is_missing(out[at]))
        fail("'" + shown(what) + "' with " +
             (name.empty() ? "this many arguments" : "the argument '" + shown(name) + "'") + " is not supported");
      out[at] = given.values[i];
    }
    for (size_t i = 0; i < least; ++i) {
      if (is_missing(out[i])) fail("'" + shown(what) + "' without the argument '" + names[i] + "'");
    }
    return out;
  }

  Value call(const Node& node) {
    const Node& callee = *node.parts[0];
    const bool method = callee.kind == Node::attribute;
    const Value of = evaluate(method ? *callee.parts[0] : callee);
    if (method && of.kind != Value::loop && of.kind != Value::text && of.kind != Value::dict)
      wrong("the method '" + shown(callee.word) + "'", of);
    if (!method && of.kind != Value::macro && of.kind != Value::function) wrong("a call", of);
    const Arguments given = arguments(node);
    if (of.kind == Value::macro) return call_macro(*of.body, given);
    if (of.kind == Value::function) return function(narrow(*of.chars), given);
    if (of.kind == Value::text) return text_method(callee.word, of, given);
    if (of.kind == Value::dict) return dict_method(callee.word, of, given);
    if (callee.word != "cycle" || given.values.empty()) fail("'loop." + shown(callee.word) + "(...)' is not supported");
    return given.values[size_t(of.n) % given.values.size()];
  }
  Value call_macro(const Node& macro, const Arguments& given) {
    const List values = bind(macro.word, given, macro.words);
    for (const Value& value : values) check_kept(value);
    std::vector<Scope> callers(1);  // the caller's variables are not visible inside
    callers.swap(scopes_);
    for (size_t i = 0; i < values.size(); ++i) {
      const NodePtr& otherwise = macro.parts[i + 1];
      set(macro.words[i], !is_missing(values[i]) ? values[i]
                          : otherwise != nullptr ? evaluate(*otherwise)
                                                 : nothing(macro.words[i]));
    }
    Text text;
    run(*macro.parts[0], text);
    callers.swap(scopes_);
    return Value::of(std::move(text));
  }

  // In filters.cpp: the functions, methods, filters and tests that a template may use.
  Value function(const std::string& name, const Arguments& given);
  template <class F>
  Value cased(const Text& text, const F& upper);
  Value joined(const List& list, const Text& between);
  Value strip(const std::string& name, const Text& text, const Arguments& given);
  Value starts_or_ends(const std::string& name, const Text& text, const Arguments& given);
  Value split(const Text& text, const Arguments& given);
  Value replace(const Text& text, const Arguments& given);
  Value text_method(const std::string& name, const Value& of, const Arguments& given);
  Value dict_method(const std::string& name, const Value& of, const Arguments& given);
  void write_json(Text& out, const Value& v, int64_t indent, int64_t depth);
  Value path(Value v, const std::string& names);
  Value selected(const std::string& name, const Value& of, Arguments given);
  Value mapped(const Value& of, Arguments given);
  Value filter(const std::string& name, const Value& of, Arguments given);
  bool test(const std::string& name, const Value& of, const Arguments& given);

  Scope globals_;
  std::vector<Scope> scopes_;  // of loops and blocks in the running macro
  std::time_t time_;
  int depth_ = 0;
};

}  // namespace llm::jinja
