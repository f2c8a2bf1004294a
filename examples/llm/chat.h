// Conversations: the model's template renders the messages to a text, of which the beginning that the cache already has
// is not read again.
#pragma once

#include <cstdio>
#include <istream>

#include "session.h"

namespace llm {

class Chat {
 public:
  explicit Chat(Session& session, const std::string& system = "");

  struct Answer {
    Session::Text text;
    Session::Times times;
    int64_t kept = 0;  // tokens of the conversation that were in the cache
  };
  // Appends a message and the answer to it. If there is no room for it, the messages stay as they were.
  Answer say(const std::string& message, const Session::Print& print = {});
  void reset();  // removes all messages except one of the system at the beginning
  void save(const std::string& file) const;
  void load(const std::string& file);

  std::vector<Message> messages;

 private:
  Session& session_;
  Tokenizer::Ids cached_;  // the tokens whose keys and values are in the cache
};

struct ChatOptions {
  std::string system, load;
};
// Reads messages from `in`, one in each line, and writes answers to `out`. Lines that begin with / are commands.
int chat(const Settings& settings, const ChatOptions& options, std::istream& in, std::FILE* out);

}  // namespace llm
