#include "compile/regex.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/utf8.h"
#include "compile/json_text.h"
#include "compile/looks.h"
#include "compile/unicode.h"

namespace dlm::compile {
namespace {

constexpr size_t kDeepestGroup = 250;  // as in Rust
constexpr uint32_t kMostCount = 1000000;

Node in_utf8(Expressions& expressions, const CodePoints& points) {
  return expressions.characters(points);
}

bool is_space(char32_t point) { return contains(unicode_spaces(), point); }

struct Flags {
  bool ignores_case = false, is_multiline = false, dot_is_all = false, has_crlf = false,
       is_unicode = true, is_verbose = false;
};

// A class, or part of one, while it is read.
struct OpenClass {
  bool is_negated = false;
  CodePoints items;    // since the last operator
  CodePoints left;     // before the last operator
  char operation = 0;  // & - ~; 0: none
};

class Reader {
 public:
  Reader(Expressions& expressions, std::string_view text, bool is_of_json)
      : expressions_(expressions),
        looks_(expressions, in_utf8, "regex"),
        text_(text),
        is_of_json_(is_of_json) {
    if (!json::is_utf8(text)) fail(DLM_INVALID_ARGUMENT, "regex: it is not UTF-8");
  }

  Node read() {
    open_.push_back({});
    for (skip(); at_ < text_.size(); skip()) {
      expressions_.budget().check();
      term();
    }
    if (open_.size() > 1) {
      at_ = open_.back().place;
      refuse("a group without its )");
    }
    return looks_.node(close());
  }

 private:
  struct Group {
    size_t place = 0;
    Flags flags_outside;
    std::vector<Looks::Piece> choices = {}, parts = {};
    bool can_repeat = false;  // whether the last part can
  };

  [[noreturn]] void refuse(const std::string& what) const {
    size_t place = 0;  // in characters
    for (size_t at = 0; at < at_ && at < text_.size(); at += char_bytes(text_[at])) ++place;
    fail(DLM_INVALID_ARGUMENT, "regex: %s at character %zu", what.c_str(), place);
  }

  // ---- Characters ----

  bool is_end() const { return at_ >= text_.size(); }
  bool is_at(char letter) const { return !is_end() && text_[at_] == letter; }
  bool take(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }
  char32_t peek() const {
    size_t at = at_;
    return next_char(text_, at);
  }
  char32_t next(const char* what) {
    if (is_end()) refuse(std::string("an end inside ") + what);
    return next_char(text_, at_);
  }
  // White space and comments, with the flag x.
  void skip() {
    if (!flags_.is_verbose) return;
    while (!is_end()) {
      if (text_[at_] == '#') {
        const size_t end = text_.find('\n', at_);
        at_ = end == std::string_view::npos ? text_.size() : end + 1;
      } else if (is_space(peek())) {
        next("space");
      } else {
        return;
      }
    }
  }

  // ---- Terms ----

  void add(Looks::Piece piece) {
    open_.back().parts.push_back(piece);
    open_.back().can_repeat = true;
  }

  Looks::Piece close() {
    Group& group = open_.back();
    group.choices.push_back(looks_.sequence(std::move(group.parts)));
    return looks_.either(std::move(group.choices));
  }

  void term() {
    const char letter = text_[at_];
    switch (letter) {
      case '(':
        return open_group();
      case ')': {
        if (open_.size() == 1) refuse("an unmatched )");
        ++at_;
        const Looks::Piece piece = close();
        flags_ = open_.back().flags_outside;
        open_.pop_back();
        return add(piece);
      }
      case '|':
        ++at_;
        open_.back().choices.push_back(looks_.sequence(std::move(open_.back().parts)));
        open_.back().parts.clear();
        open_.back().can_repeat = false;
        return;
      case '[':
        return add(characters(bracketed()));
      case '?':
      case '*':
      case '+':
        ++at_;
        return repeat(letter == '+' ? 1 : 0, letter == '?' ? 1 : kUnbounded, at_ - 1);
      case '{':
        return counted();
      case '.':
        ++at_;
        return add(dot());
      case '^':
        ++at_;
        return add(anchor(true, flags_.is_multiline));
      case '$':
        ++at_;
        return add(anchor(false, flags_.is_multiline));
      case '\\':
        return escaped();
      default:
        return add(literal(next("text")));
    }
  }

  Looks::Piece characters(const CodePoints& points) {
    return looks_.plain(expressions_.characters(points));
  }

  Looks::Piece literal(char32_t point) {
    if (flags_.ignores_case && (flags_.is_unicode || point < 0x80))
      return characters(folded({{point, point}}));
    std::string text;
    append_char(point, text);
    return looks_.plain(expressions_.bytes(text));
  }

  CodePoints folded(const CodePoints& points) const {
    if (!flags_.ignores_case) return points;
    if (flags_.is_unicode) return with_all_cases(points);
    CodePoints all = points;
    for (const auto& [low, high] : intersection(points, {{'A', 'Z'}, {'a', 'z'}}))
      all.push_back({low ^ 0x20, high ^ 0x20});
    return normalised(std::move(all));
  }

  Looks::Piece dot() {
    if (!flags_.is_unicode) refuse("a . of bytes, which may be no UTF-8: (?-u) is not supported");
    if (flags_.dot_is_all) return characters(complement({}));
    return characters(complement(flags_.has_crlf ? CodePoints{{'\n', '\n'}, {'\r', '\r'}}
                                                 : CodePoints{{'\n', '\n'}}));
  }

  Looks::Piece anchor(bool is_start, bool is_multiline) {
    Look look;
    const CodePoints feed{{'\n', '\n'}}, carriage{{'\r', '\r'}};
    const bool has_crlf = is_multiline && flags_.has_crlf;
    if (is_multiline) {
      // With the flag R nothing is between \r and \n.
      look.before = is_start || has_crlf ? std::array{is_start ? feed : carriage, CodePoints{}}
                                         : std::array<CodePoints, 2>{};
      look.after =
          is_start ? std::array<CodePoints, 2>{} : std::array<CodePoints, 2>{feed, CodePoints{}};
      if (has_crlf) {
        look.before = {feed, carriage};
        look.after = {feed, carriage};
      }
    }
    for (size_t before = 0; before < 4; ++before)
      for (size_t after = 0; after < 4; ++after) {
        bool holds = (is_start ? before : after) == 0;
        if (is_multiline) holds |= (is_start ? before : after) == 1;
        if (has_crlf) {
          holds |= (is_start ? before : after) == 2;
          if (before == 2 && after == 1) holds = false;
        }
        look.holds[before][after] = holds;
      }
    return looks_.look(std::move(look));
  }

  enum class Boundary : uint8_t { edge, inside, start, end, start_half, end_half };

  Looks::Piece boundary(Boundary kind) {
    Look look;
    const CodePoints word = flags_.is_unicode
                                ? unicode_word()
                                : CodePoints{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
    look.before[0] = look.after[0] = word;
    for (size_t before = 0; before < 4; ++before)
      for (size_t after = 0; after < 4; ++after) {
        const bool was = before == 1, is = after == 1;
        look.holds[before][after] = kind == Boundary::edge         ? was != is
                                    : kind == Boundary::inside     ? was == is
                                    : kind == Boundary::start      ? !was && is
                                    : kind == Boundary::end        ? was && !is
                                    : kind == Boundary::start_half ? !was
                                                                   : !is;
      }
    return looks_.look(std::move(look));
  }

  void repeat(uint32_t low, uint32_t high, size_t place) {
    Group& group = open_.back();
    if (!group.can_repeat) {
      at_ = place;
      refuse("nothing to repeat");
    }
    take("?");  // lazy ones have the same texts
    group.parts.back() = looks_.repeat(group.parts.back(), low, high);
  }

  uint32_t count() {
    while (!is_end() && is_space(peek())) next("a count");
    if (is_end() || text_[at_] < '0' || text_[at_] > '9')
      refuse("{ without a count: write \\{ for the brace,");
    uint32_t number = 0;
    for (; !is_end() && text_[at_] >= '0' && text_[at_] <= '9'; skip()) {
      number = 10 * number + static_cast<uint32_t>(text_[at_++] - '0');
      if (number > kMostCount) refuse("a count above 1,000,000");
    }
    while (!is_end() && is_space(peek())) next("a count");
    return number;
  }

  void counted() {
    const size_t place = at_++;
    skip();
    const bool has_low = !is_at(',');
    const uint32_t low = has_low ? count() : 0;
    uint32_t high = low;
    if (take(",")) {
      skip();
      while (!is_end() && is_space(peek())) next("a count");
      if (!is_at('}'))
        high = count();
      else if (has_low)
        high = kUnbounded;
      else
        refuse("{,} without a count");
    }
    if (!take("}")) refuse("a { without its }");
    if (low > high) refuse("a count whose end is below its start,");
    skip();
    repeat(low, high, place);
  }

  // ---- Groups ----

  void open_group() {
    const size_t place = at_++;
    skip();
    for (const char* look : {"?=", "?!", "?<=", "?<!"})
      if (text_.substr(at_, std::string_view(look).size()) == look)
        refuse("look-around, which this syntax does not have,");
    Group group{place, flags_};
    if (take("?P<") || take("?<")) {
      name();
    } else if (take("?")) {
      if (read_flags() == ')') {
        open_.back().can_repeat = false;
        open_.back().parts.push_back(looks_.plain(expressions_.empty()));
        return;
      }
    }
    if (open_.size() > kDeepestGroup) refuse("groups nested more than 250 deep");
    open_.push_back(std::move(group));
  }

  void name() {
    const size_t start = at_;
    while (!is_at('>')) {
      const char32_t point = next("a group's name");
      const bool is_later = at_ - start > char_bytes(text_[start]);
      const bool is_inner = point == '.' || point == '[' || point == ']';
      const bool is_letter =
          contains(unicode_word(), point) && (is_later || !contains(unicode_digits(), point));
      if (!is_letter && !(is_inner && is_later)) refuse("a letter that a group's name cannot have");
    }
    if (at_ == start) refuse("an empty name of a group");
    ++at_;
  }

  // Returns ) for flags of the rest of the group, : for those of a new one.
  char read_flags() {
    Flags flags = flags_;
    bool is_on = true, is_empty = true, has_minus = false;
    for (;;) {
      const char32_t letter = next("flags");
      if (letter == ':' || letter == ')') {
        if (has_minus && !is_on && is_empty) refuse("a - without flags");
        if (is_empty && letter == ')') refuse("a group (?) without flags");
        flags_ = flags;
        return static_cast<char>(letter);
      }
      if (letter == '-') {
        if (has_minus) refuse("a second - in flags");
        has_minus = is_empty = true;
        is_on = false;
        continue;
      }
      is_empty = false;
      switch (letter) {
        case 'i':
          flags.ignores_case = is_on;
          break;
        case 'm':
          flags.is_multiline = is_on;
          break;
        case 's':
          flags.dot_is_all = is_on;
          break;
        case 'R':
          flags.has_crlf = is_on;
          break;
        case 'u':
          flags.is_unicode = is_on;
          break;
        case 'x':
          flags.is_verbose = is_on;
          break;
        case 'U':  // which of the matches is found first makes no other set of texts
          break;
        default:
          refuse("a flag that is none of imsRUux");
      }
    }
  }

  // ---- Escapes ----

  void escaped() {
    const size_t start = at_++;
    if (is_end()) refuse("a \\ at the end");
    switch (text_[at_]) {
      case 'A':
        ++at_;
        return add(anchor(true, false));
      case 'z':
        ++at_;
        return add(anchor(false, false));
      case 'b':
        ++at_;
        if (is_at('{')) {
          if (take("{start}")) return add(boundary(Boundary::start));
          if (take("{end}")) return add(boundary(Boundary::end));
          if (take("{start-half}")) return add(boundary(Boundary::start_half));
          if (take("{end-half}")) return add(boundary(Boundary::end_half));
        }
        return add(boundary(Boundary::edge));
      case 'B':
        ++at_;
        return add(boundary(Boundary::inside));
      case '<':
        ++at_;
        return add(boundary(Boundary::start));
      case '>':
        ++at_;
        return add(boundary(Boundary::end));
      default:
        break;
    }
    CodePoints set;
    if (escaped_set(set)) return add(characters(set));
    const char32_t point = escaped_character();
    if (!flags_.is_unicode && point >= 0x80 && text_[start + 1] == 'x' && text_[start + 2] != '{')
      refuse("a byte beyond ASCII, which may be no UTF-8,");
    if (point == 0 && is_of_json_ && text_.substr(start, at_ - start) == "\\x{0}")
      return add(looks_.plain(any_character(expressions_)));
    add(literal(point));
  }

  // \d, \p{...} and the like, from the letter on.
  bool escaped_set(CodePoints& set) {
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
    set = folded(property());
    if (letter == 'P' || is_unlike_) set = complement(set);
    if (letter == 'P' && is_unlike_) set = complement(set);
    return true;
  }

  CodePoints property() {
    is_unlike_ = false;
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
      is_unlike_ = true;
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

  // A character after a backslash.
  char32_t escaped_character() {
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

  char32_t hexadecimal(int digits) {
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

  // ---- Classes ----

  CodePoints bracketed() {
    std::vector<OpenClass> open;
    const size_t place = at_;
    for (;;) {
      expressions_.budget().check();
      skip();
      if (is_end()) {
        at_ = place;
        refuse("a [ without its ]");
      }
      if (is_at('[')) {
        if (!open.empty() && ascii_class(open.back().items)) continue;
        if (open.size() >= kDeepestGroup) refuse("classes nested more than 250 deep");
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

  static void add_all(CodePoints& items, const CodePoints& set) {
    items.insert(items.end(), set.begin(), set.end());
  }

  void open_class(std::vector<OpenClass>& open) {
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

  // Ends the operand on the right of the last operator, and starts that of the next.
  void operate(OpenClass& open, char operation) const {
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

  // [:alpha:] and the like, if it is here.
  bool ascii_class(CodePoints& items) {
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

  // One character or set of a class. Whether it is a character that a range can have.
  bool class_item(CodePoints& set, char32_t& point) {
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

  void range(CodePoints& items) {
    CodePoints set;
    char32_t low = 0, high = 0;
    const bool is_character = class_item(set, low);
    skip();
    size_t after = at_ + 1;  // the character after a -
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

  Expressions& expressions_;
  Looks looks_;
  const std::string_view text_;
  const bool is_of_json_;
  size_t at_ = 0;
  bool is_unlike_ = false;  // whether the last property has !=
  Flags flags_;
  std::vector<Group> open_;
};

}  // namespace

Node regex(Expressions& expressions, std::string_view expression, bool is_of_json) {
  return Reader(expressions, expression, is_of_json).read();
}

}  // namespace dlm::compile
