#include "compile/regex/regex_text.h"

#include <optional>
#include <utility>

#include "base/error.h"
#include "base/utf8.h"
#include "compile/regex/unicode.h"

namespace dlm::compile {
namespace {

constexpr size_t kDeepestClass = 250;

void add_all(CodePoints& items, const CodePoints& set) {
  items.insert(items.end(), set.begin(), set.end());
}

}  // namespace

RegexText::RegexText(Budget& budget, std::string_view text) : budget_(budget), text_(text) {
  if (!is_utf8(text)) fail(DLM_INVALID_ARGUMENT, "regex: it is not UTF-8");
}

bool RegexText::is_at_space() const {
  if (is_end()) return false;
  size_t at = at_;
  return contains(unicode_spaces(), next_char(text_, at));
}

bool RegexText::take(std::string_view wanted) {
  if (text_.substr(at_, wanted.size()) != wanted) return false;
  at_ += wanted.size();
  return true;
}

char32_t RegexText::next(const char* what) {
  if (is_end()) refuse(std::string("an end inside ") + what);
  return next_char(text_, at_);
}

void RegexText::refuse(const std::string& what) const {
  fail(DLM_INVALID_ARGUMENT, "regex: %s at character %zu", what.c_str(),
       count_chars(text_.substr(0, at_)));
}

void RegexText::skip() {
  if (!flags_.is_verbose) return;
  while (!is_end()) {
    if (text_[at_] == '#') {
      const size_t end = text_.find('\n', at_);
      at_ = end == std::string_view::npos ? text_.size() : end + 1;
    } else if (is_at_space()) {
      next("space");
    } else {
      return;
    }
  }
}

CodePoints RegexText::folded(const CodePoints& points) const {
  if (!flags_.ignores_case) return points;
  if (flags_.is_unicode) return with_all_cases(points);
  CodePoints all = points;
  for (const auto& [low, high] : intersection(points, {{'A', 'Z'}, {'a', 'z'}}))
    all.push_back({low ^ 0x20, high ^ 0x20});
  return normalised(std::move(all));
}

bool RegexText::escaped_set(CodePoints& set) {
  const char letter = text_[at_];
  if (std::string_view("dDsSwW").find(letter) != std::string_view::npos) {
    ++at_;
    const char kind = static_cast<char>(letter | 0x20);
    if (flags_.is_unicode)
      set = kind == 'd' ? unicode_digits() : kind == 's' ? unicode_spaces() : unicode_word();
    else
      set = kind == 'd'   ? CodePoints{{'0', '9'}}
            : kind == 's' ? CodePoints{{'\t', '\r'}, {' ', ' '}}
                          : CodePoints{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
    if (letter != kind) {
      if (!flags_.is_unicode) refuse("a class of bytes beyond ASCII, which may be no UTF-8,");
      set = complement(set);
    }
    return true;
  }
  if (letter != 'p' && letter != 'P') return false;
  ++at_;
  if (!flags_.is_unicode) refuse("a property of Unicode, with the flag -u,");
  bool is_negated = letter == 'P';
  set = folded(property(is_negated));
  if (is_negated) set = complement(set);
  return true;
}

// Parses the name in \p{name} or \p{name=value}, and returns the characters that have this
// property. In \p{name!=value}, inverts `is_negated`.
CodePoints RegexText::property(bool& is_negated) {
  skip();
  std::string name;
  if (take("{")) {
    for (skip(); !is_at('}'); skip()) append_char(next("a property"), name);
    ++at_;
  } else {
    append_char(next("a property"), name);
    skip();
  }
  std::string value;
  bool has_value = true;
  if (const size_t at = name.find("!="); at != std::string::npos) {
    is_negated = !is_negated;
    value = name.substr(at + 2);
    name.resize(at);
  } else if (const size_t equal =
                 name.find_first_of(name.find(':') != std::string::npos ? ":" : "=");
             equal != std::string::npos) {
    value = name.substr(equal + 1);
    name.resize(equal);
  } else {
    has_value = false;
  }
  std::optional<CodePoints> found =
      has_value ? unicode_property(name, value) : unicode_property(name);
  if (!found) refuse("a property that Unicode does not have, " + name.substr(0, 80) + ",");
  return *std::move(found);
}

char32_t RegexText::escaped_character() {
  const char32_t letter = next("an escape");
  switch (letter) {
    case 'a':
      return 7;
    case 'f':
      return 12;
    case 't':
      return 9;
    case 'n':
      return 10;
    case 'r':
      return 13;
    case 'v':
      return 11;
    case 'x':
      return hexadecimal(2);
    case 'u':
      return hexadecimal(4);
    case 'U':
      return hexadecimal(8);
    default:
      break;
  }
  if (letter >= '0' && letter <= '9') refuse("a back-reference, which is not regular,");
  const bool is_letter = (letter >= 'A' && letter <= 'Z') || (letter >= 'a' && letter <= 'z');
  if (is_letter || letter >= 0x80 || letter == '<' || letter == '>')
    refuse("an escape that has no meaning");
  return letter;
}

char32_t RegexText::hexadecimal(int digits) {
  skip();
  const bool has_braces = take("{");
  char32_t point = 0;
  int read = 0;
  for (;; ++read) {
    if (has_braces) skip();
    if (has_braces ? is_at('}') : read == digits) break;
    if (!has_braces && read > 0) skip();
    const char32_t letter = next("an escape");
    const char32_t low = letter | 0x20;
    if (letter >= '0' && letter <= '9')
      point = 16 * point + (letter - '0');
    else if (letter < 0x80 && low >= 'a' && low <= 'f')
      point = 16 * point + (low - 'a' + 10);
    else
      refuse("an escape with a letter that is no hexadecimal digit");
    if (point > 0x10FFFF) refuse("an escape that names no character");
  }
  if (has_braces) ++at_;
  if (read == 0 || !is_scalar(static_cast<int32_t>(point)))
    refuse("an escape that names no character");
  return point;
}

CodePoints RegexText::bracketed() {
  std::vector<OpenClass> open;
  const size_t place = at_;
  for (;;) {
    budget_.check();
    skip();
    if (is_end()) {
      at_ = place;
      refuse("a [ without its ]");
    }
    if (is_at('[')) {
      if (!open.empty() && ascii_class(open.back().items)) continue;
      if (open.size() >= kDeepestClass) refuse("classes nested more than 250 deep");
      open_class(open);
    } else if (is_at(']')) {
      ++at_;
      operate(open.back(), 0);
      CodePoints set = folded(open.back().left);
      if (open.back().is_negated) set = complement(set);
      open.pop_back();
      if (open.empty()) {
        if (!flags_.is_unicode && !set.empty() && set.back().high >= 0x80)
          refuse("a class of bytes beyond ASCII, which may be no UTF-8,");
        return set;
      }
      add_all(open.back().items, set);
    } else if (take("&&")) {
      operate(open.back(), '&');
    } else if (take("--")) {
      operate(open.back(), '-');
    } else if (take("~~")) {
      operate(open.back(), '~');
    } else {
      range(open.back().items);
    }
  }
}

void RegexText::open_class(std::vector<OpenClass>& open) {
  open.push_back({});
  OpenClass& made = open.back();
  ++at_;
  skip();
  if (take("^")) {
    made.is_negated = true;
    skip();
  }
  for (; is_at('-'); skip()) {
    ++at_;
    made.items.push_back({'-', '-'});
  }
  if (made.items.empty() && take("]")) made.items.push_back({']', ']'});
}

// Applies the previous operator to the characters before it and after it. `operation` is the
// operator that the parser has just read. The next call applies this operator.
void RegexText::operate(OpenClass& open, char operation) const {
  CodePoints right = normalised(std::move(open.items));
  open.items.clear();
  if (open.operation == 0) {
    open.left = std::move(right);
  } else {
    const CodePoints left = folded(open.left);
    right = folded(right);
    if (open.operation == '&')
      open.left = intersection(left, right);
    else if (open.operation == '-')
      open.left = intersection(left, complement(right));
    else
      open.left =
          joined(intersection(left, complement(right)), intersection(right, complement(left)));
  }
  open.operation = operation;
}

// Parses [:alpha:] or a similar ASCII class. Returns false if there is no such class at the current
// position.
bool RegexText::ascii_class(CodePoints& items) {
  static const std::pair<std::string_view, CodePoints> kClasses[] = {
      {"alnum", {{'0', '9'}, {'A', 'Z'}, {'a', 'z'}}},
      {"alpha", {{'A', 'Z'}, {'a', 'z'}}},
      {"ascii", {{0, 0x7F}}},
      {"blank", {{'\t', '\t'}, {' ', ' '}}},
      {"cntrl", {{0, 0x1F}, {0x7F, 0x7F}}},
      {"digit", {{'0', '9'}}},
      {"graph", {{'!', '~'}}},
      {"lower", {{'a', 'z'}}},
      {"print", {{' ', '~'}}},
      {"punct", {{'!', '/'}, {':', '@'}, {'[', '`'}, {'{', '~'}}},
      {"space", {{'\t', '\r'}, {' ', ' '}}},
      {"upper", {{'A', 'Z'}}},
      {"word", {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}},
      {"xdigit", {{'0', '9'}, {'A', 'F'}, {'a', 'f'}}},
  };
  std::string_view rest = text_.substr(at_);
  if (rest.substr(0, 2) != "[:") return false;
  const bool is_negated = rest.substr(2, 1) == "^";
  rest.remove_prefix(is_negated ? 3 : 2);
  for (const auto& [name, set] : kClasses) {
    if (rest.substr(0, name.size()) != name || rest.substr(name.size(), 2) != ":]") continue;
    at_ += (is_negated ? 3 : 2) + name.size() + 2;
    CodePoints points = folded(set);
    add_all(items, is_negated ? complement(points) : points);
    return true;
  }
  return false;
}

// Parses one character or one set inside a class in brackets. For a character, sets `point` and
// returns true. For a set such as \d, adds to `set` and returns false.
bool RegexText::class_item(CodePoints& set, char32_t& point) {
  if (!take("\\")) {
    point = next("a class");
    return true;
  }
  if (is_end()) refuse("a \\ at the end");
  if (escaped_set(set)) return false;
  if (std::string_view("AzbB<>").find(text_[at_]) != std::string_view::npos)
    refuse("an anchor inside a class");
  point = escaped_character();
  return true;
}

void RegexText::range(CodePoints& items) {
  CodePoints set;
  char32_t low = 0, high = 0;
  const bool is_character = class_item(set, low);
  skip();
  size_t after = at_ + 1;  // index of the character after the -
  if (is_at('-')) {
    const size_t here = std::exchange(at_, after);
    skip();
    after = std::exchange(at_, here);
  }
  const bool is_range =
      is_at('-') && after < text_.size() && text_[after] != ']' && text_[after] != '-';
  if (!is_range) {
    if (is_character) return items.push_back({low, low});
    return add_all(items, set);
  }
  at_ = after;
  if (!is_character || !class_item(set, high)) refuse("a range whose end is a class");
  if (low > high) refuse("a range whose end is below its start");
  items.push_back({low, high});
}

}  // namespace dlm::compile
