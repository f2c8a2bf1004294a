// The functions, methods, filters and tests of chat templates.
#include "template/run.h"

namespace llm::jinja {

Value Run::function(const std::string& name, const Arguments& given) {
  if (name == "namespace") {
    Dict dict;
    for (size_t i = 0; i < given.values.size(); ++i) {
      if (!given.names[i].empty()) put(dict, wide(given.names[i]), given.values[i]);
      else if (given.values[i].kind == Value::dict && i == 0) dict = *given.values[i].entries;
      else fail("a namespace of " + name_of(given.values[i]) + " is not supported");
    }
    return dict_of(std::move(dict), Value::space);
  }
  if (name == "range") {
    const List a = bind(name, given, {"start", "stop", "step"}, 1);
    for (const Value& v : a) if (!is_missing(v) && !is_number(v)) wrong("a range", v);
    const bool one = is_missing(a[1]);
    const int64_t from = one ? 0 : a[0].n, to = one ? a[0].n : a[1].n, step = is_missing(a[2]) ? 1 : a[2].n;
    if (step == 0) fail("a range with step 0");
    List list;
    for (int64_t i = from; step > 0 ? i < to : i > to;) {
      if (list.size() >= kLongestRange) fail("a range of more than " + std::to_string(kLongestRange) + " numbers");
      list.push_back(Value::of(Value::integer, i));
      if (__builtin_add_overflow(i, step, &i)) break;
    }
    return list_of(std::move(list), Value::range);
  }
  if (name == "raise_exception") {
    throw Error("the chat template refuses this conversation: " +
                shown(narrow(text_of(bind(name, given, {"message"}, 1)[0])), 300));
  }
  const std::string format = narrow(text_of(bind(name, given, {"format"}, 1)[0]));
  std::tm local{};
  localtime_r(&time_, &local);
  char text[256];
  const size_t n = std::strftime(text, sizeof(text), format.c_str(), &local);
  if (n == 0 && !format.empty()) fail("this time format is not supported");
  return made(wide(std::string_view(text, n)));
}

// Upper or lower case: `upper` says for each character which. Only ASCII is supported.
template <class F>
Value Run::cased(const Text& text, const F& upper) {
  Text out = text;
  for (size_t i = 0; i < out.size(); ++i) {
    char32_t& c = out[i];
    if ((c & kCharacter) >= 128) fail("upper or lower case of '" + narrow(Text(1, c)) + "' is not supported");
    if (is_letter(c)) c = upper(i) ? c & ~char32_t(32) : c | 32;
  }
  return made(std::move(out));
}

Value Run::joined(const List& list, const Text& between) {
  Text out;
  for (size_t i = 0; i < list.size(); ++i) append(out, (i > 0 ? between : Text()) + text_of(list[i]));
  return Value::of(std::move(out));
}

Value Run::strip(const std::string& name, const Text& text, const Arguments& given) {
  const Value by = bind(name, given, {"chars"})[0];
  const Text* const chars = by.kind == Value::text ? by.chars.get() : nullptr;
  if (!is_missing(by) && by.kind != Value::none && chars == nullptr) wrong("'" + name + "' by the value", by);
  if (chars != nullptr) spend_search(text, *chars);
  return made(stripped(text, chars, name != "rstrip", name != "lstrip"));
}

// Whether a text starts, or ends, with another text or with one of several.
Value Run::starts_or_ends(const std::string& name, const Text& text, const Arguments& given) {
  const Value what = bind(name, given, {"what"}, 1)[0];
  const List any = what.kind == Value::list && what.n == Value::tuple ? *what.elements : List{what};
  return Value::of(std::any_of(any.begin(), any.end(), [&](const Value& v) {
    if (v.kind != Value::text) wrong("'" + name + "'", v);
    return v.chars->size() <= text.size() &&
           is_at(text, name == "startswith" ? 0 : text.size() - v.chars->size(), *v.chars);
  }));
}

// Splits at each separator, or at whitespace, which is dropped at the beginning of a part.
Value Run::split(const Text& text, const Arguments& given) {
  const auto a = bind("split", given, {"sep", "maxsplit"});
  const bool spaces = a[0].kind <= Value::none;
  const Text by = spaces ? Text() : text_of(a[0]);
  spend_search(text, by);
  if (!spaces && (a[0].kind != Value::text || by.empty())) fail("'split' by this value is not supported");
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
    out.push_back(made(text.substr(at, end - at)));
    if (end == text.size()) break;
    at = end + by.size();
  }
  return list_of(std::move(out));
}

Value Run::replace(const Text& text, const Arguments& given) {
  const auto a = bind("replace", given, {"old", "new", "count"}, 2);
  const Text from = text_of(a[0]), to = text_of(a[1]);
  spend_search(text, from);
  if (from.empty()) fail("'replace' of an empty string is not supported");
  Text out;
  size_t done = 0;
  for (int64_t times = is_number(a[2]) ? a[2].n : -1; times != 0; --times) {
    const size_t at = find(text, from, done);
    if (at == Text::npos) break;
    append(out, text.substr(done, at - done) + to);
    done = at + from.size();
  }
  return made(out + text.substr(done));
}

Value Run::text_method(const std::string& name, const Value& of, const Arguments& given) {
  const Text& text = *of.chars;
  spend(text.size());
  if (name == "strip" || name == "lstrip" || name == "rstrip") return strip(name, text, given);
  if (name == "startswith" || name == "endswith") return starts_or_ends(name, text, given);
  if (name == "split") return split(text, given);
  if (name == "join") return joined(elements(bind(name, given, {"list"}, 1)[0]), text);
  if (name == "replace") return replace(text, given);
  if (!is_one_of(" upper lower capitalize title ", name))
    fail("the method '" + shown(name) + "' of a string is not supported");
  bind(name, given, {});
  if (name == "capitalize") return cased(text, [](size_t i) { return i == 0; });
  if (name == "title") return cased(text, [&](size_t i) { return i == 0 || !is_letter(text[i - 1]); });
  return cased(text, [&](size_t) { return name == "upper"; });
}

Value Run::dict_method(const std::string& name, const Value& of, const Arguments& given) {
  if (name == "get") {
    const auto a = bind(name, given, {"key", "default"}, 1);
    const Value* const found = a[0].kind == Value::text ? get(*of.entries, *a[0].chars) : nullptr;
    return found != nullptr ? *found : is_missing(a[1]) ? Value::of(Value::none) : a[1];
  }
  if (!is_one_of(" keys values items ", name)) fail("the method '" + shown(name) + "' of a dict is not supported");
  bind(name, given, {});
  List list;
  for (const auto& item : *of.entries) {
    const Value key = Value::of(item.first);
    if (name == "keys") list.push_back(key);
    else if (name == "values") list.push_back(item.second);
    else list.push_back(list_of({key, item.second}, Value::tuple));
  }
  return list_of(std::move(list), Value::view);
}

// Writes JSON as json.dumps does with ensure_ascii=False. indent < 0: in one line.
void Run::write_json(Text& out, const Value& v, int64_t indent, int64_t depth) {
  spend(1);
  const auto new_line = [&](int64_t d) {
    if (indent >= 0) append(out, U"\n" + Text(size_t(indent * d), U' '));
  };
  if ((v.kind == Value::list && v.n <= Value::tuple) || v.kind == Value::dict) {
    const bool list = v.kind == Value::list;
    const size_t n = size_t(length(v));
    out += list ? U'[' : U'{';
    for (size_t i = 0; i < n; ++i) {
      if (i > 0) append(out, indent >= 0 ? U"," : U", ");
      new_line(depth + 1);
      if (!list) write_json(out, Value::of((*v.entries)[i].first), indent, depth), append(out, U": ");
      write_json(out, list ? (*v.elements)[i] : (*v.entries)[i].second, indent, depth + 1);
    }
    if (n > 0) new_line(depth);
    out += list ? U']' : U'}';
  } else if (v.kind == Value::text) {
    out += U'"';
    for (const char32_t c : *v.chars) {
      const std::string quoted = Json(narrow(Text(1, c))).dump();
      append(out, wide(quoted.substr(1, quoted.size() - 2), c & ~kCharacter));
    }
    out += U'"';
  } else if (v.kind == Value::none || is_number(v)) {
    append(out, v.kind == Value::none      ? U"null"
                : v.kind == Value::integer ? text_of(v)
                                           : (v.n != 0 ? U"true" : U"false"));
  } else {
    wrong("JSON", v);
  }
}

Value Run::path(Value v, const std::string& names) {
  for (size_t at = 0; at <= names.size();) {
    const size_t end = std::min(names.size(), names.find('.', at));
    const std::string part = names.substr(at, end - at);
    const bool digits = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    v = item(v, digits ? Value::of(Value::integer, std::stoll(part)) : Value::of(wide(part)));
    at = end + 1;
  }
  return v;
}

// The elements that pass or fail a test, or whose attribute does.
Value Run::selected(const std::string& name, const Value& of, Arguments given) {
  const bool by_attribute = name.size() > 6, wanted = name[0] == 's';
  const auto word = [&] {
    if (given.values.empty()) return std::string();
    if (given.values[0].kind != Value::text || !given.names[0].empty())
      fail("'" + name + "' of this form is not supported");
    return narrow(*given.take().chars);
  };
  if (by_attribute && given.values.empty()) fail("'" + name + "' without an attribute");
  const std::string attribute = by_attribute ? word() : "", how = word();
  List out;
  for (const Value& v : elements(of)) {
    const Value seen = by_attribute ? path(v, attribute) : v;
    if ((how.empty() ? truth(seen) : test(how, seen, given)) == wanted) out.push_back(v);
  }
  return list_of(std::move(out), Value::stream);
}

// An attribute of each element, or the result of a filter for each.
Value Run::mapped(const Value& of, Arguments given) {
  if (given.values.empty() || given.values[0].kind != Value::text) fail("'map' of this form is not supported");
  const std::string first = narrow(*given.values[0].chars);
  const bool by_attribute = given.names[0] == "attribute";
  const Value otherwise = by_attribute ? bind("map", given, {"attribute", "default"})[1] : Value();
  if (!by_attribute) given.take();
  List out;
  for (const Value& v : elements(of)) {
    out.push_back(by_attribute ? path(v, first) : filter(first, v, given));
    if (out.back().kind == Value::undefined && by_attribute) out.back() = otherwise;
  }
  return list_of(std::move(out), Value::stream);
}

Value Run::filter(const std::string& name, const Value& of, Arguments given) {
  spend(of.kind == Value::text ? of.chars->size() : 0);
  if (is_one_of(" trim replace upper lower capitalize ", name))
    return text_method(name == "trim" ? "strip" : name, Value::of(text_of(of)), given);
  if (name == "tojson") {
    const auto a = bind(name, given, {"ensure_ascii", "indent"});
    const Value& indent = a[1];
    if (truth(a[0])) fail("'tojson' with ensure_ascii is not supported");
    if (indent.kind > Value::none && (indent.kind != Value::integer || indent.n < 0 || indent.n > 64))
      wrong("an indent", indent);
    Text out;
    write_json(out, of, indent.kind == Value::integer ? indent.n : -1, 0);
    return Value::of(std::move(out));
  }
  if (name == "default" || name == "d") {
    const auto a = bind(name, given, {"default_value", "boolean"});
    if (of.kind != Value::undefined && !(truth(a[1]) && !truth(of))) return of;
    return is_missing(a[0]) ? Value::of(Text()) : a[0];
  }
  if (name == "join") {
    const auto a = bind(name, given, {"d", "attribute"});
    List list = elements(of);
    if (a[1].kind == Value::text) for (Value& v : list) v = path(v, narrow(*a[1].chars));
    return joined(list, text_of(a[0]));
  }
  if (is_one_of(" select reject selectattr rejectattr ", name)) return selected(name, of, std::move(given));
  if (name == "map") return mapped(of, std::move(given));
  if (!is_one_of(" length count string list first last reverse items title ", name))
    fail("the filter '" + shown(name) + "' is not supported");
  bind(name, given, {});
  if (name == "length" || name == "count") return Value::of(Value::integer, length(of));
  if (name == "string") return of.kind == Value::text ? of : made(text_of(of));
  if (name == "list") return list_of(elements(of));
  if (name == "first" || name == "last") {
    if (name == "last") length(of);  // fails for a stream
    const List list = elements(of);
    return list.empty() ? nothing("the " + name + " of an empty list") : name == "first" ? list.front() : list.back();
  }
  if (name == "reverse") {
    List list = elements(of);
    std::reverse(list.begin(), list.end());
    return of.kind == Value::text ? joined(list, {}) : list_of(std::move(list), Value::stream);
  }
  if (name == "items") {
    if (of.kind != Value::dict && of.kind != Value::undefined) wrong("'items'", of);
    return list_of(of.kind == Value::dict ? *dict_method(name, of, given).elements : List(), Value::stream);
  }
  const Text text = text_of(of);
  return cased(text, [&](size_t i) {
    return i == 0 || is_space(text[i - 1]) || find(U"-({[<", Text(1, text[i - 1])) != Text::npos;
  });
}

bool Run::test(const std::string& name, const Value& of, const Arguments& given) {
  static const std::map<std::string, const char*> comparisons{
      {"eq", "=="},      {"equalto", "=="}, {"==", "=="}, {"ne", "!="}, {"!=", "!="}, {"lt", "<"},
      {"lessthan", "<"}, {"<", "<"},        {"le", "<="}, {"<=", "<="}, {"gt", ">"},  {"greaterthan", ">"},
      {">", ">"},        {"ge", ">="},      {">=", ">="}, {"in", "in"}};
  if (const auto at = comparisons.find(name); at != comparisons.end())
    return compare(at->second, of, bind(name, given, {"other"}, 1)[0]);
  if (name == "divisibleby") return arithmetic("%", of, bind(name, given, {"num"}, 1)[0]).n == 0;
  if (!is_one_of(" defined undefined none string mapping sequence iterable number integer float boolean true false odd "
                 "even ",
                 name))
    fail("the test '" + shown(name) + "' is not supported");
  bind(name, given, {});
  if (name == "defined" || name == "undefined") return (of.kind == Value::undefined) == (name[0] == 'u');
  if (name == "none") return of.kind == Value::none;
  if (name == "string") return of.kind == Value::text;
  if (name == "mapping") return of.kind == Value::dict;
  const bool indexed = of.kind == Value::undefined || of.kind == Value::text || of.kind == Value::dict ||
                       (of.kind == Value::list && of.n < Value::view);
  if (name == "sequence") return indexed;
  if (name == "iterable") return indexed || of.kind == Value::list || of.kind == Value::loop;
  if (name == "number") return is_number(of);
  if (name == "integer") return of.kind == Value::integer;
  if (name == "float") return false;
  if (name == "boolean") return of.kind == Value::boolean;
  if (name == "true" || name == "false") return of.kind == Value::boolean && (of.n != 0) == (name[0] == 't');
  return arithmetic("%", of, Value::of(Value::integer, 2)).n == (name == "odd");
}

}  // namespace llm::jinja
