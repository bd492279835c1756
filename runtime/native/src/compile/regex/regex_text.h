// Parses characters, escapes and character classes of a regular expression in Rust's syntax.
// regex.cc parses the rest.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"
#include "compile/automata/expression.h"

namespace dlm::compile {

struct RegexFlags {
  bool ignores_case = false, is_multiline = false, dot_is_all = false, has_crlf = false,
       is_unicode = true, is_verbose = false;
};

// The base class of the parser in regex.cc. The parser reads the text from left to right. This
// class stores the current position and the current flags.
class RegexText {
 public:
  RegexText(Budget& budget, std::string_view text);

 protected:
  [[noreturn]] void refuse(const std::string& what) const;

  bool is_end() const { return at_ >= text_.size(); }
  bool is_at(char letter) const { return !is_end() && text_[at_] == letter; }
  bool is_at_space() const;
  bool take(std::string_view wanted);
  // Returns the next character. At the end of the text, throws an error whose message contains
  // `what`.
  char32_t next(const char* what);
  // Skips white space and comments if the flag x of the regular expression is set. Otherwise does
  // nothing.
  void skip();

  // Returns the characters in `points`. If the flag i is set, also returns all characters that
  // differ only in case from a character in `points`.
  CodePoints folded(const CodePoints& points) const;
  // Parses \d, \p{...} and similar sets. The caller has already parsed the backslash. Returns false
  // if there is no such set at the current position.
  bool escaped_set(CodePoints& set);
  // Parses the rest of an escaped character, after the backslash.
  char32_t escaped_character();
  // Parses a class in brackets, such as [a-z&&[^x]]. The current position must be the opening
  // bracket.
  CodePoints bracketed();

  Budget& budget_;
  const std::string_view text_;
  size_t at_ = 0;
  RegexFlags flags_;

 private:
  // The state of a class in brackets during parsing. Classes in brackets can be nested.
  struct OpenClass {
    bool is_negated = false;
    CodePoints items = {};  // the characters after the last operator
    CodePoints left = {};   // the result of all operators before the last operator
    char operation = 0;     // the last operator (& - or ~), or 0 if there is no operator
  };

  CodePoints property(bool& is_negated);
  char32_t hexadecimal(int digits);
  void open_class(std::vector<OpenClass>& open);
  void operate(OpenClass& open, char operation) const;
  bool ascii_class(CodePoints& items);
  bool class_item(CodePoints& set, char32_t& point);
  void range(CodePoints& items);
};

}  // namespace dlm::compile
