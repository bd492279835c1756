#include "compile/json/ecma_pattern.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/utf8.h"
#include "compile/json/json_text.h"
#include "compile/regex/looks.h"
#include "compile/regex/unicode.h"

namespace dlm::compile {
namespace {

// The sets of characters that \d, \w and \s match in ECMA-262 (JavaScript), followed by the
// characters that only some regex engines include in \s. The last two sets contain line breaks. In
// ECMA-262, \d and \w contain only ASCII characters. \s contains the characters that ECMA-262 calls
// WhiteSpace and LineTerminator.
const CodePoints kDigits{{'0', '9'}};
const CodePoints kWord{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CodePoints kSpaces{{9, 13},          {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                         {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                         {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
// Only ECMA-262 includes this character in \s.
const CodePoints kZeroWidthSpace{{0xFEFF, 0xFEFF}};
const CodePoints kOtherSpaces{{0x1C, 0x1F}, {0x85, 0x85}, {0x180E, 0x180E}};
const CodePoints kNewline{{'\n', '\n'}};
const CodePoints kLineEnds{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

// any_digits() returns the characters that at least one regex engine includes in \d. any_word()
// returns the characters that at least one regex engine includes in \w.
const CodePoints& any_digits() {
  static const CodePoints points = *unicode_property("Nd", std::nullopt);
  return points;
}
const CodePoints& any_word() {
  static const CodePoints points = [] {
    CodePoints made{{0x200C, 0x200D}};
    for (const char* const name : {"L", "M", "N", "Pc", "Alphabetic"})
      made = joined(made, *unicode_property(name, std::nullopt));
    return made;
  }();
  return points;
}

struct Flags {
  bool ignores_case = false, is_multiline = false, dot_is_all = false;
};

// A parsed term. If the term matches exactly one character, `set` contains the characters that it
// matches. `is_start` is true for ^, and `is_end` is true for $. A look-behind may contain only one
// term, which must be ^ or match exactly one character.
struct Term {
  Looks::Piece piece;
  std::optional<CodePoints> set;
  bool is_start = false, is_end = false;

  bool is_single() const { return set || is_start || is_end; }
};

class EcmaReader {
 public:
  EcmaReader(Expressions& expressions, std::string_view pattern, Looks::Spell spell, Found found)
      : expressions_(expressions),
        spell_(spell),
        pattern_(pattern),
        looks_(expressions, spell, "pattern " + json::quoted(pattern)),
        is_wide_(found == Found::perhaps) {
    if (!is_utf8(pattern)) fail(DLM_INVALID_ARGUMENT, "the pattern is not UTF-8");
  }

  Node read() {
    // ECMA-262 does not allow (?i) at the start of a pattern. This parser accepts it, as other
    // regex engines do.
    if (take("(?i)")) flags_.ignores_case = true;
    const Term found = disjunction();
    if (at_ < pattern_.size()) refuse("an unmatched )");
    const Looks::Piece anything =
        looks_.plain(expressions_.repeat(spell_(expressions_, complement({})), 0, kUnbounded));
    return looks_.node(looks_.sequence({anything, found.piece, anything}));
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    const size_t place = count_chars(pattern_.substr(0, at_));
    throw Error(DLM_INVALID_ARGUMENT, "pattern " + json::quoted(pattern_) + " has " + what +
                                          " at character " + std::to_string(place));
  }

  bool is_end() const { return at_ >= pattern_.size(); }
  bool is_at(char letter) const { return !is_end() && pattern_[at_] == letter; }
  bool take(std::string_view wanted) {
    if (pattern_.substr(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }
  char32_t next() {
    if (is_end()) refuse("an end too early");
    return next_char(pattern_, at_);
  }

  CodePoints folded(const CodePoints& points) const {
    return flags_.ignores_case ? with_all_cases(points) : points;
  }

  Term of_set(const CodePoints& points) {
    return {looks_.plain(spell_(expressions_, points)), points};
  }

  // ---- Terms ----

  Term disjunction() {
    std::vector<Looks::Piece> choices;
    Term made;
    bool is_single = true;
    do {
      const Term choice = alternative();
      choices.push_back(choice.piece);
      is_single = is_single && choice.is_single();
      if (choice.set) made.set = joined(made.set.value_or(CodePoints{}), *choice.set);
      made.is_start |= choice.is_start;
      made.is_end |= choice.is_end;
    } while (take("|"));
    if (!is_single) made = {};
    made.piece = looks_.either(std::move(choices));
    return made;
  }

  Term alternative() {
    std::vector<Looks::Piece> parts;
    Term last;
    while (!is_end() && !is_at('|') && !is_at(')')) {
      expressions_.budget().check();
      last = term();
      parts.push_back(last.piece);
    }
    if (parts.size() != 1) last = {};
    last.piece = looks_.sequence(std::move(parts));
    return last;
  }

  Term term() {
    const size_t place = at_;
    bool can_repeat = true;
    Term made = atom(can_repeat);
    uint32_t low = 1, high = 1;
    if (!quantifier(low, high)) return made;
    if (!can_repeat) {
      at_ = place;
      refuse("an anchor or look-around that is repeated");
    }
    take("?");  // lazy quantifiers match the same strings as greedy quantifiers
    if (is_at('*') || is_at('+') || is_at('?')) refuse("a second quantifier");
    return {looks_.repeat(made.piece, low, high), std::nullopt};
  }

  Term atom(bool& can_repeat) {
    const char letter = pattern_[at_];
    switch (letter) {
      case '(':
        return group(can_repeat);
      case '[':
        ++at_;
        return of_set(bracketed());
      case '.':
        ++at_;
        return of_set(complement(flags_.dot_is_all ? CodePoints{}
                                 : is_wide_        ? kNewline
                                                   : kLineEnds));
      case '^':
      case '$':
        ++at_;
        can_repeat = false;
        return anchor(letter == '^');
      case '\\':
        ++at_;
        if (is_end()) refuse("a \\ at the end");
        if (pattern_[at_] == 'b' || pattern_[at_] == 'B') {
          can_repeat = false;
          return boundary(pattern_[at_++] == 'b');
        }
        return of_set(folded(escape()));
      case '*':
      case '+':
      case '?':
        refuse(std::string(1, letter) + " with nothing to repeat");
      case '{':
        if (uint32_t low = 0, high = 0; quantifier(low, high)) refuse("{ with nothing to repeat");
        break;
      default:
        break;
    }
    const char32_t point = next();
    return of_set(folded({{point, point}}));
  }

  // Parses one of the quantifiers * + ? {n} {n,} {n,m}. Returns false if there is no quantifier at
  // this position. As in browsers, a brace that starts no quantifier is a literal character.
  bool quantifier(uint32_t& low, uint32_t& high) {
    if (is_at('*') || is_at('+') || is_at('?')) {
      const char letter = pattern_[at_++];
      low = letter == '+' ? 1 : 0;
      high = letter == '?' ? 1 : kUnbounded;
      return true;
    }
    if (!is_at('{')) return false;
    size_t at = at_ + 1;
    const auto number = [&](uint32_t& value) {
      const size_t start = at;
      value = 0;
      for (; at < pattern_.size() && pattern_[at] >= '0' && pattern_[at] <= '9'; ++at)
        value = std::min(10 * value + static_cast<uint32_t>(pattern_[at] - '0'), kMostCount + 1);
      return at > start;
    };
    const bool has_low = number(low);
    high = low;
    if (at < pattern_.size() && pattern_[at] == ',') {
      ++at;
      const bool has_high = number(high);
      if (!has_low && at < pattern_.size() && pattern_[at] == '}')
        refuse("{, without a lower count, which engines read differently: write 0,");
      if (!has_high) high = kUnbounded;
    }
    if (!has_low || at >= pattern_.size() || pattern_[at] != '}') return false;
    if (low > kMostCount || (high > kMostCount && high != kUnbounded))
      refuse("a count above 1,000,000");
    if (low > high) refuse("a count whose end is below its start");
    at_ = at + 1;
    return true;
  }

  Term anchor(bool is_start) {
    Look look;
    // In Python, $ also matches before a \n at the end of the string. If is_wide_ is true, this
    // code builds the texts in which at least one engine finds a match. So it lets $ match before
    // every \n, even if more characters follow. The result may contain more texts than necessary.
    const bool is_before_newline = is_wide_ && !is_start && !flags_.is_multiline;
    const bool has_set = flags_.is_multiline || is_before_newline;
    CodePoints& set = (is_start ? look.before : look.after)[0];
    if (has_set) set = is_wide_ && flags_.is_multiline ? kLineEnds : kNewline;
    for (size_t before = 0; before < 4; ++before)
      for (size_t after = 0; after < 4; ++after) {
        const size_t kind = is_start ? before : after;
        look.holds[before][after] = kind == 0 || (kind == 1 && has_set);
      }
    Term made{looks_.look(std::move(look)), std::nullopt};
    if (is_before_newline) made.set = kNewline;
    if (!flags_.is_multiline) (is_start ? made.is_start : made.is_end) = true;
    return made;
  }

  Term boundary(bool is_edge) {
    Look look;
    // The sets with index 0 contain the word characters of all regex engines. The sets with index 1
    // contain the characters that are word characters only in some engines.
    look.before[0] = look.after[0] = kWord;
    look.before[1] = look.after[1] = intersection(any_word(), complement(kWord));
    for (size_t before = 0; before < 4; ++before)
      for (size_t after = 0; after < 4; ++after) {
        const auto is_word = [](size_t kind, bool to_some) {
          return kind == 1 || (kind == 2 && to_some);
        };
        const auto holds = [&](bool to_some) {
          return (is_word(before, to_some) != is_word(after, to_some)) == is_edge;
        };
        // In Python before version 3.14, \B does not match in an empty text.
        const bool is_unclear = !is_edge && before == 0 && after == 0;
        look.holds[before][after] =
            is_wide_ ? holds(false) || holds(true) : holds(false) && holds(true) && !is_unclear;
      }
    return {looks_.look(std::move(look)), std::nullopt};
  }

  // ---- Groups ----

  Term group(bool& can_repeat) {
    const size_t place = at_++;
    const Flags outside = flags_;
    enum { plain, ahead, behind } kind = plain;
    bool is_negative = false;
    if (take("?=") || take("?!")) {
      kind = ahead;
      is_negative = pattern_[at_ - 1] == '!';
    } else if (take("?<=") || take("?<!")) {
      kind = behind;
      is_negative = pattern_[at_ - 1] == '!';
    } else if (take("?<") || take("?P<")) {
      name();
    } else if (take("?")) {
      modifiers(place);
    }
    if (++depth_ > kDeepestGroup) refuse("groups nested more than 250 deep");
    is_wide_ = is_wide_ != is_negative;
    Term inner = disjunction();
    is_wide_ = is_wide_ != is_negative;
    if (!take(")")) {
      at_ = place;
      refuse("a group without its )");
    }
    --depth_;
    flags_ = outside;
    if (kind == plain) return inner;
    can_repeat = false;
    if (kind == ahead && !(inner.is_single() && !inner.is_start))
      return {looks_.ahead(inner.piece, is_negative), std::nullopt};
    if (kind == behind && !(inner.is_single() && !inner.is_end)) {
      at_ = place;
      refuse("look-behind of more than one character, which is not supported,");
    }
    // This look-around depends only on the character before or after the position.
    Look look;
    if (inner.set) (kind == ahead ? look.after : look.before)[0] = *inner.set;
    for (size_t before = 0; before < 4; ++before)
      for (size_t after = 0; after < 4; ++after) {
        const size_t beside = kind == ahead ? after : before;
        const bool is_found =
            (beside == 1 && inner.set) || (beside == 0 && (inner.is_start || inner.is_end));
        look.holds[before][after] = is_found != is_negative;
      }
    return {looks_.look(std::move(look)), std::nullopt};
  }

  void name() {
    const size_t end = pattern_.find('>', at_);
    const std::string_view found = pattern_.substr(at_, end - at_);
    if (end == std::string_view::npos || found.empty() ||
        found.find_first_of("()[]{}|*+?.^\\") != std::string_view::npos)
      refuse("a group without a name");
    at_ = end + 1;
  }

  // Parses the flags of a group such as (?i:...) or (?s-m:...), up to the colon.
  void modifiers(size_t place) {
    bool is_on = true;
    for (;;) {
      const char32_t letter = next();
      if (letter == ':') return;
      if (letter == 'i')
        flags_.ignores_case = is_on;
      else if (letter == 's')
        flags_.dot_is_all = is_on;
      else if (letter == 'm')
        flags_.is_multiline = is_on;
      else if (letter == '-' && is_on)
        is_on = false;
      else {
        at_ = place;
        refuse("a group that is not regular or not supported, (?...");
      }
    }
  }

  // ---- Classes and escapes ----

  CodePoints bracketed() {
    const size_t place = at_ - 1;
    const bool is_negated = take("^");
    if (is_at(']') && pattern_.find(']', at_ + 1) != std::string_view::npos)
      refuse("] at the start of a class, which engines read differently: write \\]");
    is_wide_ = is_wide_ != is_negated;
    CodePoints items;
    const auto add = [&](const CodePoints& set) {
      items.insert(items.end(), set.begin(), set.end());
    };
    while (!take("]")) {
      expressions_.budget().check();
      if (is_end()) {
        at_ = place;
        refuse("a [ without its ]");
      }
      const CodePoints low = class_item();
      if (!is_at('-') || at_ + 1 >= pattern_.size() || pattern_[at_ + 1] == ']') {
        add(low);
        continue;
      }
      ++at_;
      const CodePoints high = class_item();
      const auto is_character = [](const CodePoints& set) {
        return set.size() == 1 && set[0].low == set[0].high;
      };
      // Browsers treat the - as an ordinary character here.
      if (!is_character(low) || !is_character(high)) {
        add(low);
        add({{'-', '-'}});
        add(high);
      } else if (low[0].low > high[0].low) {
        refuse("a range whose end is below its start");
      } else {
        items.push_back({low[0].low, high[0].low});
      }
    }
    is_wide_ = is_wide_ != is_negated;
    const CodePoints set = folded(normalised(std::move(items)));
    return is_negated ? complement(set) : set;
  }

  CodePoints class_item() {
    if (!take("\\")) {
      const char32_t point = next();
      return {{point, point}};
    }
    if (take("b")) return {{8, 8}};
    return escape();
  }

  // Returns the characters of \d, \w or \s. If `is_wide` is true, returns the characters that at
  // least one engine includes in the set. Otherwise returns only the characters that all engines
  // include.
  static CodePoints letter_class(char32_t letter, bool is_wide) {
    if (letter == 'd') return is_wide ? any_digits() : kDigits;
    if (letter == 'w') return is_wide ? any_word() : kWord;
    return is_wide ? joined(kSpaces, kOtherSpaces)
                   : intersection(kSpaces, complement(kZeroWidthSpace));
  }

  // Parses an escape and returns the set of characters that the escape matches. The caller has
  // already parsed the backslash.
  CodePoints escape() {
    const char32_t letter = next();
    const auto of = [](char32_t point) { return CodePoints{{point, point}}; };
    const char32_t after = is_end() ? 0 : static_cast<uint8_t>(pattern_[at_]);
    switch (letter) {
      case 'd':
      case 'w':
      case 's':
        return letter_class(letter, is_wide_);
      case 'D':
      case 'W':
      case 'S':
        return complement(letter_class(letter | 0x20, !is_wide_));
      case 'p':
      case 'P':
        return property(letter == 'P');
      case 't':
        return of(9);
      case 'n':
        return of(10);
      case 'v':
        return of(11);
      case 'f':
        return of(12);
      case 'r':
        return of(13);
      case '0':
        if (after >= '0' && after <= '9') refuse("an octal escape, which is not supported,");
        return of(0);
      case 'c':
        if (!((after | 0x20) >= 'a' && (after | 0x20) <= 'z')) refuse("\\c without a letter");
        ++at_;
        return of(after & 31);
      case 'x':
        return of(hexadecimal(2));
      case 'u':
        return of(unicode_escape());
      default:
        break;
    }
    if ((letter >= '1' && letter <= '9') || letter == 'k')
      refuse("a back-reference, which is not regular,");
    if (letter == 'A' || letter == 'Z' || letter == 'z')
      refuse("an anchor that is not of ECMA-262 (write ^ or $)");
    if ((letter >= 'A' && letter <= 'Z') || (letter >= 'a' && letter <= 'z'))
      refuse("an escape that has no meaning");
    return of(letter);
  }

  CodePoints property(bool is_negated) {
    const size_t end = pattern_.find('}', at_);
    if (!take("{") || end == std::string_view::npos) refuse("\\p without {...}");
    std::string_view name = pattern_.substr(at_, end - at_);
    std::optional<std::string_view> value;
    if (const size_t equal = name.find('='); equal != std::string_view::npos) {
      value = name.substr(equal + 1);
      name = name.substr(0, equal);
    }
    const std::optional<CodePoints> found = unicode_property(name, value);
    if (!found) refuse("a property that Unicode does not have,");
    at_ = end + 1;
    return is_negated ? complement(*found) : *found;
  }

  char32_t hexadecimal(size_t digits) {
    char32_t point = 0;
    for (size_t i = 0; i < digits; ++i) {
      const char32_t letter = next(), low = letter | 0x20;
      const bool is_digit = letter >= '0' && letter <= '9';
      if (!is_digit && !(letter < 0x80 && low >= 'a' && low <= 'f'))
        refuse("an escape with too few hexadecimal digits");
      point = 16 * point + (is_digit ? letter - '0' : low - 'a' + 10);
      if (point > 0x10FFFF) refuse("an escape that names no character");
    }
    return point;
  }

  char32_t unicode_escape() {
    char32_t point = 0;
    if (take("{")) {
      const size_t end = pattern_.find('}', at_);
      if (end == std::string_view::npos || end == at_) refuse("an escape that names no character");
      point = hexadecimal(end - at_);
      ++at_;
    } else {
      point = hexadecimal(4);
      if (point >= 0xD800 && point < 0xDC00 && take("\\u")) {
        const char32_t second = hexadecimal(4);
        if (second < 0xDC00 || second > 0xDFFF) refuse("an escape of half a character");
        point = 0x10000 + ((point - 0xD800) << 10) + (second - 0xDC00);
      }
    }
    if (!is_scalar(static_cast<int32_t>(point))) refuse("an escape of half a character");
    return point;
  }

  Expressions& expressions_;
  const Looks::Spell spell_;
  const std::string_view pattern_;
  Looks looks_;
  size_t at_ = 0;
  int depth_ = 0;
  // Determines the characters of sets such as \d. If is_wide_ is true, a set contains the
  // characters that at least one engine includes in the set. Otherwise it contains only the
  // characters that all engines include.
  bool is_wide_;
  Flags flags_;
};

}  // namespace

Node pattern_in_string(Expressions& expressions, std::string_view pattern, Found found) {
  return EcmaReader(expressions, pattern, spelled, found).read();
}

Node pattern_in_text(Expressions& expressions, std::string_view pattern, Found found) {
  return EcmaReader(expressions, pattern, in_utf8, found).read();
}

}  // namespace dlm::compile
