// The text of a regular expression in Rust's syntax: its characters, escapes and classes. regex.cc
// reads the rest.
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
  char32_t next(const char* what);  // `what` names where it must not end
  // White space and comments, with the flag x.
  void skip();

  // With the characters that are equal to one of the set, with the flag i.
  CodePoints folded(const CodePoints& points) const;
  // \d, \p{...} and the like, from the letter on, if one is here.
  bool escaped_set(CodePoints& set);
  // A character after a backslash.
  char32_t escaped_character();
  // A class, from its [ on.
  CodePoints bracketed();

  Budget& budget_;
  const std::string_view text_;
  size_t at_ = 0;
  RegexFlags flags_;

 private:
  // A class, or one inside it, while it is read.
  struct OpenClass {
    bool is_negated = false;
    CodePoints items = {};  // since the last operator
    CodePoints left = {};   // before the last operator
    char operation = 0;     // & - ~; 0: none
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
