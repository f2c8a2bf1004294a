// Chats: templates against Jinja2 (examples/llm/golden/make_templates.py), and what follows from them.
#include "golden.h"
#include "support/catch.h"
#include "template.h"

using namespace golden;
using llm::Message;
using llm::Template;

namespace {

std::vector<Message> messages_of(const Json& json) {
  std::vector<Message> out;
  for (const Json& message : json) out.push_back({message["role"].get<std::string>(), message["content"].get<std::string>()});
  return out;
}

// The text, or null and the reason.
Json rendered(const std::string& source, const std::vector<Message>& messages, const Json& variables, std::time_t now, std::string* why = nullptr) {
  try {
    return Template(source).render(messages, variables, now).text;
  } catch (const llm::Error& e) {
    CHECK(std::string(e.what()).find('\n') == std::string::npos);
    if (why != nullptr) *why = e.what();
    return nullptr;
  }
}

}  // namespace

TEST_CASE("templates make what Jinja2 makes of them, or are refused") {
  setenv("TZ", "UTC", 1);
  const Json golden = read("templates");
  const std::time_t now = golden["now"].get<int64_t>();
  for (const auto& family : golden["families"].items()) {
    const std::string source = family.value()["template"];
    for (size_t i = 0; i < golden["chats"].size(); ++i) {
      INFO(family.key() << ", chat " << i);
      const auto messages = messages_of(golden["chats"][i]);
      std::string why;
      CHECK(rendered(source, messages, family.value()["variables"], now, &why) == family.value()["texts"][i]);
      CHECK((why.empty() || why.find("refuses this conversation") != std::string::npos));
      if (i < family.value()["other_texts"].size()) CHECK(rendered(source, messages, family.value()["other_variables"], now) == family.value()["other_texts"][i]);
    }
  }
  const auto messages = messages_of(golden["chats"][0]);
  for (const Json& snippet : golden["snippets"]) {
    std::string why;
    const Json text = rendered(snippet[0], messages, Json::object(), now, &why);
    INFO(snippet[0] << " " << why);
    CHECK(text == snippet[1]);
  }
  for (const Json& source : golden["refused"]) {
    std::string why;
    INFO(source);
    CHECK(rendered(source, messages, Json::object(), now, &why).is_null());
    CHECK(why.find("the chat template, line 1: ") == 0);
  }
}
