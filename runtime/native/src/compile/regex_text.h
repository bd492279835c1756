// Parses characters, escapes and classes of a regular expression in Rust's syntax. regex.cc parses
// the rest.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"
#include "compile/expression.h"

namespace dlm::compile {

struct RegexFlags {
  bool ignores_case = false, is_multiline = false, dot_is_all = false, has_crlf = false,
       is_unicode = true, is_verbose = false;
};

class RegexText {
 public:
  RegexText(Budget& budget, std::string_view text);

 protected:
  [[noreturn]] void refuse(const std::string& what) const;

  bool is_end() const { return at_ >= text_.size(); }
  bool is_at(char letter) const { return !is_end() && text_[at_] == letter; }
  bool is_at_space() const;
  bool take(std::string_view wanted);
  char32_t next(const char* what);  // `what` describes the context if the text ends here
  // Skips white space and comments if the flag x is set.
  void skip();

  // With the flag i, adds the characters that differ from one of the set only in case.
  CodePoints folded(const CodePoints& points) const;
  // Parses \d, \p{...} and similar sets, starting at the letter. Returns false if there is no such
  // set here.
  bool escaped_set(CodePoints& set);
  // Parses the rest of an escaped character, after the backslash.
  char32_t escaped_character();
  // Parses a class, starting at its [.
  CodePoints bracketed();

  Budget& budget_;
  const std::string_view text_;
  size_t at_ = 0;
  RegexFlags flags_;

 private:
  // A class, or a nested class, that is being parsed.
  struct OpenClass {
    bool is_negated = false;
    CodePoints items = {};  // after the last operator
    CodePoints left = {};   // before the last operator
    char operation = 0;     // the last operator: & - or ~; 0: no operator yet
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
