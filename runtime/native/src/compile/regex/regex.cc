#include "compile/regex/regex.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/utf8.h"
#include "compile/regex/looks.h"
#include "compile/regex/regex_text.h"
#include "compile/regex/unicode.h"

namespace dlm::compile {
namespace {

class RegexReader : RegexText {
 public:
  RegexReader(Expressions& expressions, std::string_view text)
      : RegexText(expressions.budget(), text),
        expressions_(expressions),
        looks_(expressions, in_utf8, "regex") {}

  Node read() {
    open_.push_back({});
    for (skip(); at_ < text_.size(); skip()) {
      budget_.check();
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
    RegexFlags flags_outside;
    std::vector<Looks::Piece> choices = {}, parts = {};
    bool can_repeat = false;  // true if the last part can be repeated
  };

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
      // With the flag R, \r\n is one line break. So no line starts or ends between \r and \n.
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
    take("?");  // lazy quantifiers match the same texts as greedy quantifiers
    group.parts.back() = looks_.repeat(group.parts.back(), low, high);
  }

  uint32_t count() {
    while (is_at_space()) next("a count");
    if (is_end() || text_[at_] < '0' || text_[at_] > '9')
      refuse("{ without a count: write \\{ for the brace,");
    uint32_t number = 0;
    for (; !is_end() && text_[at_] >= '0' && text_[at_] <= '9'; skip()) {
      number = 10 * number + static_cast<uint32_t>(text_[at_++] - '0');
      if (number > kMostCount) refuse("a count above 1,000,000");
    }
    while (is_at_space()) next("a count");
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
      while (is_at_space()) next("a count");
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
    if (open_.size() > size_t{kDeepestGroup}) refuse("groups nested more than 250 deep");
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

  // Parses flags, such as the i-s in (?i-s) or (?i-s:...). Returns the character after the flags.
  // This character is ")" if the flags apply to the rest of the current group, or ":" if the flags
  // apply to a new group.
  char read_flags() {
    RegexFlags flags = flags_;
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
        // Swapping greedy and lazy quantifiers does not change the set of matching texts.
        case 'U':
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
    add(literal(point));
  }

  Expressions& expressions_;
  Looks looks_;
  std::vector<Group> open_;
};

}  // namespace

Node regex(Expressions& expressions, std::string_view expression) {
  return RegexReader(expressions, expression).read();
}

}  // namespace dlm::compile
