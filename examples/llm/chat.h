// Talking with a model: its template makes a text of the messages, and what the cache has of that text already is not
// read again.
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
    int64_t kept = 0;  // tokens of the conversation that the cache had
  };
  // Puts a message and the answer to it behind the others. Where there is no room for it the messages are left as they
  // were.
  Answer say(const std::string& message, const Session::Print& print = {});
  void reset();  // of the messages only one of the system stays
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
// Messages from `in`, one to a line, to answers in `out`; lines that begin with / are for the program.
int chat(const Settings& settings, const ChatOptions& options, std::istream& in, std::FILE* out);

}  // namespace llm
