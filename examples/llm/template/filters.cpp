// The functions, methods, filters and tests of chat templates.
#include <functional>

#include "template/run.h"

namespace llm {
namespace jinja {

Value Run::function(int line, const std::string& name, const Arguments& given) {
  if (name == "namespace") {
    Dict dict;
    for (size_t i = 0; i < given.values.size(); ++i) {
      if (!given.names[i].empty()) put(dict, wide(given.names[i]), given.values[i]);
      else if (given.values[i].kind == Value::dict && i == 0) dict = *given.values[i].entries;
      else fail(line, "a namespace of " + std::string(name_of(given.values[i])) + " is not supported");
    }
    dict_of(line, dict);  // for its checks
    spaces_.push_back(std::move(dict));
    Value out = Value::of(Value::space);
    out.attributes = &spaces_.back();
    return out;
  }
  if (name == "range") {
    const auto values = bind(line, name, given, {"start", "stop", "step"}, 1);
    for (size_t i = 0; i < given.values.size(); ++i) if (!is_number(values[i])) wrong(line, "a range", values[i]);
    const bool one = given.values.size() == 1;
    const int64_t from = one ? 0 : values[0].n, to = one ? values[0].n : values[1].n,
                  step = given.values.size() < 3 ? 1 : values[2].n;
    if (step == 0) fail(line, "a range of step 0");
    List list;
    for (int64_t i = from; step > 0 ? i < to : i > to;) {
      if (int64_t(list.size()) >= kLongestRange)
        fail(line, "a range of more than " + std::to_string(kLongestRange) + " numbers");
      list.push_back(Value::of(Value::integer, i));
      if (__builtin_add_overflow(i, step, &i)) break;
    }
    return list_of(line, std::move(list), Value::range);
  }
  if (name == "raise_exception") {
    throw Error("the chat template refuses this conversation: " +
                shown(narrow(text_of(line, bind(line, name, given, {"message"}, 1)[0])), 300));
  }
  const std::string format = narrow(text_of(line, bind(line, name, given, {"format"}, 1)[0]));
  std::tm local{};
  localtime_r(&time_, &local);
  char text[256];
  const size_t n = std::strftime(text, sizeof(text), format.c_str(), &local);
  if (n == 0 && !format.empty()) fail(line, "this format of a time is not supported");
  return made(line, wide(std::string_view(text, n)));
}

// To upper or lower case: `upper` says of each character what it becomes. Beyond ASCII that is a science of its own.
template <class F>
Value Run::cased(int line, const Text& text, const F& upper) {
  Text out = text;
  for (size_t i = 0; i < out.size(); ++i) {
    if ((out[i] & kCharacter) >= 128)
      fail(line, "upper and lower case of '" + narrow(Text(1, out[i])) + "' are not supported");
    if (is_letter(out[i])) out[i] = upper(i) ? out[i] & ~char32_t(32) : out[i] | 32;
  }
  return made(line, std::move(out));
}

Value Run::joined(int line, const List& list, const Text& between) {
  Text out;
  for (size_t i = 0; i < list.size(); ++i) append(line, out, (i > 0 ? between : Text()) + text_of(line, list[i]));
  return Value::of(std::move(out));
}

Value Run::strip(int line, const std::string& name, const Text& text, const Arguments& given) {
  const Value chars = bind(line, name, given, {"chars"})[0];
  if (!is_missing(chars) && chars.kind != Value::none && chars.kind != Value::text)
    wrong(line, "'" + name + "' by the value", chars);
  if (chars.kind == Value::text) spend_search(line, text, *chars.chars);
  return made(line, stripped(text, chars.kind == Value::text ? chars.chars.get() : nullptr, name != "rstrip",
                             name != "lstrip"));
}

// Whether a text starts, or ends, with another one or with any of several.
Value Run::starts_or_ends(int line, const std::string& name, const Text& text, const Arguments& given) {
  const Value what = bind(line, name, given, {"what"}, 1)[0];
  if (what.kind != Value::text && !(what.kind == Value::list && what.n == Value::tuple))
    wrong(line, "'" + name + "'", what);
  const List any = what.kind == Value::text ? List{what} : *what.elements;
  return Value::of(std::any_of(any.begin(), any.end(), [&](const Value& v) {
    if (v.kind != Value::text) wrong(line, "'" + name + "'", v);
    return v.chars->size() <= text.size() &&
           is_at(text, name == "startswith" ? 0 : text.size() - v.chars->size(), *v.chars);
  }));
}

// At each separator, or at whitespace, which is left out where a part would begin.
Value Run::split(int line, const Text& text, const Arguments& given) {
  const auto a = bind(line, "split", given, {"sep", "maxsplit"});
  const bool spaces = a[0].kind <= Value::none;
  const Text by = spaces ? Text() : text_of(line, a[0]);
  spend_search(line, text, by);
  if (!spaces && (a[0].kind != Value::text || by.empty())) fail(line, "'split' by nothing");
  const auto end_of = [&](size_t begin) {
    return spaces ? size_t(std::find_if(text.begin() + int64_t(begin), text.end(), is_space) - text.begin())
                  : std::min(text.size(), find(text, by, begin));
  };
  List out;
  size_t at = 0;
  for (int64_t splits = is_number(a[1]) ? a[1].n : -1;; --splits) {
    while (spaces && at < text.size() && is_space(text[at])) ++at;
    if (spaces && at == text.size()) break;
    const size_t end = splits == 0 ? text.size() : end_of(at);
    out.push_back(made(line, text.substr(at, end - at)));
    if (end == text.size()) break;
    at = end + by.size();
  }
  return list_of(line, std::move(out));
}

Value Run::replace(int line, const Text& text, const Arguments& given) {
  const auto a = bind(line, "replace", given, {"old", "new", "count"}, 2);
  const Text from = text_of(line, a[0]), to = text_of(line, a[1]);
  spend_search(line, text, from);
  if (from.empty()) fail(line, "'replace' of an empty text is not supported");
  Text out;
  size_t done = 0;
  for (int64_t times = is_number(a[2]) ? a[2].n : -1; times != 0; --times) {
    const size_t at = find(text, from, done);
    if (at == Text::npos) break;
    append(line, out, text.substr(done, at - done) + to);
    done = at + from.size();
  }
  return made(line, out + text.substr(done));
}

Value Run::text_method(int line, const std::string& name, const Value& of, const Arguments& given) {
  const Text& text = *of.chars;
  spend(line, int64_t(text.size()));
  if (name == "strip" || name == "lstrip" || name == "rstrip") return strip(line, name, text, given);
  if (name == "startswith" || name == "endswith") return starts_or_ends(line, name, text, given);
  if (name == "split") return split(line, text, given);
  if (name == "join") return joined(line, elements(line, bind(line, name, given, {"list"}, 1)[0]), text);
  if (name == "replace") return replace(line, text, given);
  if (!is_one_of(" upper lower capitalize title ", name))
    fail(line, "the method '" + shown(name) + "' of a text is not supported");
  bind(line, name, given, {});
  if (name == "capitalize") return cased(line, text, [](size_t i) { return i == 0; });
  if (name == "title") return cased(line, text, [&](size_t i) { return i == 0 || !is_letter(text[i - 1]); });
  return cased(line, text, [&](size_t) { return name == "upper"; });
}

Value Run::dict_method(int line, const std::string& name, const Value& of, const Arguments& given) {
  if (name == "get") {
    const auto a = bind(line, name, given, {"key", "default"}, 1);
    const Value* const found = a[0].kind == Value::text ? get(*of.entries, *a[0].chars) : nullptr;
    return found != nullptr ? *found : given.values.size() > 1 ? a[1] : Value::of(Value::none);
  }
  if (!is_one_of(" keys values items ", name))
    fail(line, "the method '" + shown(name) + "' of a dict is not supported");
  bind(line, name, given, {});
  List list;
  for (const auto& item : *of.entries) {
    const Value key = Value::of(item.first);
    if (name == "keys") list.push_back(key);
    else if (name == "values") list.push_back(item.second);
    else list.push_back(list_of(line, {key, item.second}, Value::tuple));
  }
  return list_of(line, std::move(list), Value::view);
}

// As json.dumps without escapes of what is not ASCII; indent < 0: in one line.
void Run::write_json(int line, Text& out, const Value& v, int64_t indent, int64_t depth) {
  spend(line, 1);
  const auto new_line = [&](int64_t d) {
    if (indent >= 0) append(line, out, U"\n" + Text(size_t(indent * d), U' '));
  };
  if ((v.kind == Value::list && v.n <= Value::tuple) || v.kind == Value::dict) {
    const bool list = v.kind == Value::list;
    const size_t n = size_t(length(line, v));
    out += list ? U'[' : U'{';
    for (size_t i = 0; i < n; ++i) {
      if (i > 0) append(line, out, indent >= 0 ? U"," : U", ");
      new_line(depth + 1);
      if (!list) write_json(line, out, Value::of((*v.entries)[i].first), indent, depth), append(line, out, U": ");
      write_json(line, out, list ? (*v.elements)[i] : (*v.entries)[i].second, indent, depth + 1);
    }
    if (n > 0) new_line(depth);
    out += list ? U']' : U'}';
  } else if (v.kind == Value::text) {
    out += U'"';
    for (const char32_t c : *v.chars) {
      const char32_t plain = c & kCharacter, origin = c & ~kCharacter;
      const char *const escaped = "\"\\\n\r\t\f\b", *const letters = "\"\\nrtfb";
      const char* const at = plain != 0 && plain < 128 ? std::strchr(escaped, int(plain)) : nullptr;
      std::string text;
      if (at != nullptr) text = std::string("\\") + letters[at - escaped];
      else if (plain < 32) text = std::string("\\u00") + "01"[plain / 16] + "0123456789abcdef"[plain % 16];
      append(line, out, text.empty() ? Text(1, c) : wide(text, origin));
    }
    out += U'"';
  } else if (v.kind == Value::none || is_number(v)) {
    append(line, out,
           v.kind == Value::none      ? U"null"
           : v.kind == Value::boolean ? (v.n != 0 ? U"true" : U"false")
                                      : text_of(line, v));
  } else {
    wrong(line, "JSON", v);
  }
}

Value Run::path(int line, Value v, const std::string& names) {
  for (size_t at = 0; at <= names.size();) {
    const size_t end = std::min(names.size(), names.find('.', at));
    const std::string part = names.substr(at, end - at);
    const bool digits = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    v = item(line, v, digits ? Value::of(Value::integer, std::stoll(part)) : Value::of(wide(part)));
    at = end + 1;
  }
  return v;
}

// The elements that pass a test, or whose attribute does; or that do not.
Value Run::selected(int line, const std::string& name, const Value& of, const Arguments& given) {
  const bool by_attribute = name.size() > 6, wanted = name[0] == 's';
  const size_t used = by_attribute ? 2 : 1;
  for (size_t i = 0; i < std::min(used, given.values.size()); ++i) {
    if (given.values[i].kind != Value::text || !given.names[i].empty())
      fail(line, "'" + name + "' of this form is not supported");
  }
  if (by_attribute && given.values.empty()) fail(line, "'" + name + "' without an attribute");
  const std::string attribute = by_attribute ? narrow(*given.values[0].chars) : "",
                    how = given.values.size() >= used ? narrow(*given.values[used - 1].chars) : "";
  Arguments rest;
  for (size_t i = used; i < given.values.size(); ++i)
    rest.values.push_back(given.values[i]), rest.names.push_back(given.names[i]);
  List out;
  for (const Value& v : elements(line, of)) {
    const Value seen = by_attribute ? path(line, v, attribute) : v;
    if ((how.empty() ? truth(seen) : test(line, how, seen, rest)) == wanted) out.push_back(v);
  }
  return list_of(line, std::move(out), Value::stream);
}

// An attribute of each element, or what a filter makes of it.
Value Run::mapped(int line, const Value& of, Arguments given) {
  if (given.values.empty() || given.values[0].kind != Value::text) fail(line, "'map' of this form is not supported");
  const std::string first = narrow(*given.values[0].chars);
  const bool by_attribute = given.names[0] == "attribute";
  const Value otherwise = by_attribute ? bind(line, "map", given, {"attribute", "default"})[1] : Value();
  if (!by_attribute) given.values.erase(given.values.begin()), given.names.erase(given.names.begin());
  List out;
  for (const Value& v : elements(line, of)) {
    out.push_back(by_attribute ? path(line, v, first) : filter(line, first, v, given));
    if (out.back().kind == Value::undefined && by_attribute) out.back() = otherwise;
  }
  return list_of(line, std::move(out), Value::stream);
}

Value Run::filter(int line, const std::string& name, const Value& of, Arguments given) {
  spend(line, of.kind == Value::text ? int64_t(of.chars->size()) : 0);
  const bool of_text =
      name == "trim" || name == "replace" || name == "upper" || name == "lower" || name == "capitalize";
  if (of_text) return text_method(line, name == "trim" ? "strip" : name, Value::of(text_of(line, of)), given);
  if (name == "tojson") {
    const auto a = bind(line, name, given, {"ensure_ascii", "indent"});
    const Value& indent = a[1];
    if (truth(a[0])) fail(line, "'tojson' in ASCII is not supported");
    if (indent.kind > Value::none && (indent.kind != Value::integer || indent.n < 0 || indent.n > 64))
      wrong(line, "an indent", indent);
    Text out;
    write_json(line, out, of, indent.kind == Value::integer ? indent.n : -1, 0);
    return Value::of(std::move(out));
  }
  if (name == "length" || name == "count")
    return bind(line, name, given, {}), Value::of(Value::integer, length(line, of));
  if (name == "default" || name == "d") {
    const auto a = bind(line, name, given, {"default_value", "boolean"});
    if (of.kind != Value::undefined && !(truth(a[1]) && !truth(of))) return of;
    return given.values.empty() ? Value::of(Text()) : a[0];
  }
  if (name == "join") {
    const auto a = bind(line, name, given, {"d", "attribute"});
    List list = elements(line, of);
    if (a[1].kind == Value::text) for (Value& v : list) v = path(line, v, narrow(*a[1].chars));
    return joined(line, list, text_of(line, a[0]));
  }
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
    return selected(line, name, of, given);
  if (name == "map") return mapped(line, of, std::move(given));
  if (!is_one_of(" string list first last reverse items title ", name))
    fail(line, "the filter '" + shown(name) + "' is not supported");
  bind(line, name, given, {});
  if (name == "string") return of.kind == Value::text ? of : made(line, text_of(line, of));
  if (name == "list") return list_of(line, elements(line, of));
  if (name == "first" || name == "last") {
    if (name == "last") length(line, of);  // a stream has no end
    const List list = elements(line, of);
    return list.empty() ? nothing("the " + name + " of nothing") : name == "first" ? list.front() : list.back();
  }
  if (name == "reverse") {
    List list = elements(line, of);
    std::reverse(list.begin(), list.end());
    return of.kind == Value::text ? joined(line, list, {}) : list_of(line, std::move(list), Value::stream);
  }
  if (name == "items") {
    if (of.kind != Value::dict && of.kind != Value::undefined) wrong(line, "'items'", of);
    return list_of(line, of.kind == Value::dict ? *dict_method(line, name, of, given).elements : List(), Value::stream);
  }
  const Text text = text_of(line, of);
  return cased(line, text, [&](size_t i) {
    return i == 0 || is_space(text[i - 1]) || find(U"-({[<", Text(1, text[i - 1])) != Text::npos;
  });
}

bool Run::test(int line, const std::string& name, const Value& of, const Arguments& given) {
  const std::pair<const char*, const char*> comparisons[] = {
      {"eq", "=="},      {"equalto", "=="}, {"==", "=="}, {"ne", "!="}, {"!=", "!="}, {"lt", "<"},
      {"lessthan", "<"}, {"<", "<"},        {"le", "<="}, {"<=", "<="}, {"gt", ">"},  {"greaterthan", ">"},
      {">", ">"},        {"ge", ">="},      {">=", ">="}, {"in", "in"}};
  for (const auto& comparison : comparisons) {
    if (name == comparison.first) return compare(line, comparison.second, of, bind(line, name, given, {"other"}, 1)[0]);
  }
  if (name == "divisibleby") return arithmetic(line, "%", of, bind(line, name, given, {"num"}, 1)[0]).n == 0;
  if (!is_one_of(" defined undefined none string mapping sequence iterable number integer float boolean true false odd "
                 "even ",
                 name))
    fail(line, "the test '" + shown(name) + "' is not supported");
  bind(line, name, given, {});
  if (name == "defined" || name == "undefined") return (of.kind == Value::undefined) == (name[0] == 'u');
  if (name == "none") return of.kind == Value::none;
  if (name == "string") return of.kind == Value::text;
  if (name == "mapping") return of.kind == Value::dict;
  const bool loops =
      of.kind == Value::text || of.kind == Value::list || of.kind == Value::dict || of.kind == Value::undefined;
  if (name == "sequence" || name == "iterable")
    return loops && !(name == "sequence" && of.kind == Value::list && of.n >= Value::view);
  if (name == "number") return is_number(of);
  if (name == "integer") return of.kind == Value::integer;
  if (name == "float") return false;
  if (name == "boolean") return of.kind == Value::boolean;
  if (name == "true" || name == "false") return of.kind == Value::boolean && (of.n != 0) == (name[0] == 't');
  return arithmetic(line, "%", of, Value::of(Value::integer, 2)).n == (name == "odd");
}

}  // namespace jinja
}  // namespace llm
