#include "template/run.h"

namespace llm {

Template::Template(std::string_view source) : root_(jinja::parsed(source)) {}

Rendered Template::render(const std::vector<Message>& messages, const Json& variables, std::time_t now) const {
  using namespace jinja;
  Run run(now);
  List list;
  for (const Message& message : messages) {
    const bool is_name = std::all_of(message.role.begin(), message.role.end(),
                                     [](char c) { return is_letter(static_cast<unsigned char>(c)) || c == '_'; });
    if (!is_name)
      throw Error("the role " + shown(message.role) + " is not supported");  // templates put roles into control tokens
    const char32_t origin = message.role == "assistant" ? kByModel : kByOthers;
    const Value role = Value::of(wide(message.role)), content = Value::of(wide(message.content, origin));
    list.push_back(run.dict_of({{U"role", role}, {U"content", content}}));
  }
  run.set("messages", run.list_of(std::move(list)));
  const auto value_of = [](const Json& json) {
    if (json.is_boolean()) return Value::of(json.get<bool>());
    if (json.is_string()) return Value::of(wide(json.get<std::string>()));
    if (json.is_null()) return Value::of(Value::none);
    const bool huge = json.is_number_unsigned() && json.get<uint64_t>() > uint64_t(INT64_MAX);
    if (json.is_number_integer() && !huge) return Value::of(Value::integer, json.get<int64_t>());
    throw Error("a chat template variable is not true, false, null, an integer or a string");
  };
  for (const auto& item : variables.items()) run.set(item.key(), value_of(item.value()));
  Text text;
  run.run(*root_, text);

  Rendered out;
  char32_t last = 0;
  for (const char32_t c : text) {
    const char32_t origin = c & ~kCharacter;
    if (origin != last && origin != 0) out.plain.push_back({out.text.size(), 0, origin == kByModel});
    out.text += utf8_of(c & kCharacter);
    if (origin != 0) out.plain.back().end = out.text.size();
    last = origin;
  }
  return out;
}

}  // namespace llm
