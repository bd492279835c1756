#include "compile/grammar/grammar_text.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "base/utf8.h"

namespace dlm::compile {
namespace {

constexpr size_t kMostRules = 1000;
constexpr size_t kMostGrammarBytes = 1 << 20;

bool is_name(char letter) {
  return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
         (letter >= '0' && letter <= '9') || letter == '-' || letter == '_';
}

class GrammarReader {
 public:
  GrammarReader(Expressions& expressions, std::string_view text)
      : expressions_(expressions), text_(text) {
    if (text.size() > kMostGrammarBytes)
      refuse_grammar(text, 0, "the grammar is larger than 1 MiB");
    size_t at = 0;
    while (at < text.size()) {
      const Utf8Start start = utf8_start(text.substr(at));
      if (start.kind != Utf8Start::whole) refuse_grammar(text, at, "bytes that are not UTF-8");
      at += start.bytes;
    }
  }

  GrammarText read() {
    for (skip(true); !is_end(); skip(true)) rule();
    for (const GrammarRule& each : rules_)
      if (!each.is_defined)
        refuse_grammar(text_, each.at, "rule '" + each.name + "' is not defined");
    const auto root = numbers_.find("root");
    if (root == numbers_.end()) refuse("no rule 'root', which a grammar starts with");
    return {std::move(rules_), root->second};
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const { refuse_grammar(text_, at_, why); }
  [[noreturn]] void refuse_here(const std::string& expected) const {
    size_t end = at_;
    if (!is_end()) next_char(text_, end);
    refuse("expected " + expected + ", not " +
           (is_end() ? "the end" : json::quoted(text_.substr(at_, end - at_))));
  }

  bool is_end() const { return at_ >= text_.size(); }
  bool is_at(char letter) const { return !is_end() && text_[at_] == letter; }
  bool take(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  // Skips spaces and comments. If `has_lines` is true, also skips line breaks.
  void skip(bool has_lines) {
    for (; !is_end(); ++at_) {
      if (is_at('#'))
        while (!is_end() && !is_at('\n') && !is_at('\r')) ++at_;
      if (is_end()) return;
      const char letter = text_[at_];
      if (letter == ' ' || letter == '\t') continue;
      if (!has_lines || (letter != '\n' && letter != '\r')) return;
    }
  }

  std::string name() {
    const size_t start = at_;
    while (!is_end() && is_name(text_[at_])) ++at_;
    if (at_ == start) refuse_here("the name of a rule");
    return std::string(text_.substr(start, at_ - start));
  }

  uint32_t number_of(const std::string& name, size_t at) {
    const auto [found, is_new] = numbers_.emplace(name, static_cast<uint32_t>(rules_.size()));
    if (is_new) {
      if (rules_.size() == kMostRules)
        refuse_grammar(text_, at, "more than " + std::to_string(kMostRules) + " rules");
      rules_.push_back({name, {}, at, false});
    }
    return found->second;
  }

  void rule() {
    const size_t at = at_;
    const std::string found = name();
    skip(false);
    if (!take("::=")) refuse_here("::=");
    const uint32_t number = number_of(found, at);
    if (rules_[number].is_defined)
      refuse_grammar(text_, at, "rule '" + found + "' is defined twice");
    rules_[number].is_defined = true;
    skip(true);
    GrammarChoices made = choices(0);
    if (!is_end() && !is_at('\n') && !is_at('\r')) refuse_here("a part of the rule, or a new line");
    rules_[number].choices = std::move(made);
  }

  GrammarChoices choices(int depth) {
    if (depth > kDeepestGroup)
      refuse("groups are inside each other more than " + std::to_string(kDeepestGroup) + " times");
    GrammarChoices made;
    do {
      skip(true);
      made.push_back(sequence(depth));
    } while (take("|"));
    return made;
  }

  GrammarSequence sequence(int depth) {
    GrammarSequence made;
    for (;; skip(depth > 0)) {
      expressions_.budget().check();
      if (is_end()) return made;
      GrammarPart part{GrammarPart::node};
      part.at = at_;
      const char letter = text_[at_];
      if (letter == '"') {
        part.texts = literal();
      } else if (letter == '[') {
        part.texts = expressions_.characters(characters());
      } else if (letter == '.') {
        ++at_;
        part.texts = expressions_.characters(complement({}));
      } else if (letter == '(') {
        ++at_;
        part.kind = GrammarPart::group;
        part.choices = choices(depth + 1);
        if (!take(")")) refuse_here("the ) of a group");
      } else if (is_name(letter)) {
        part.kind = GrammarPart::rule;
        part.number = number_of(name(), part.at);
      } else if (letter == '*' || letter == '+' || letter == '?' || letter == '{') {
        if (made.empty()) refuse("nothing to repeat");
        repeat(made.back());
        continue;
      } else if (letter == '<' || letter == '!') {
        refuse("references to tokens are not supported: write the text of the token");
      } else {
        return made;
      }
      made.push_back(std::move(part));
    }
  }

  void repeat(GrammarPart& part) {
    uint32_t low = 0, high = kUnbounded;
    const char letter = text_[at_++];
    if (letter == '+') low = 1;
    if (letter == '?') high = 1;
    if (letter == '{') {
      skip(true);
      low = high = count();
      skip(true);
      if (take(",")) {
        skip(true);
        high = is_at('}') ? kUnbounded : count();
        skip(true);
      }
      if (!take("}")) refuse_here("the } of a count");
      if (low > high) refuse("a count ends below its start");
    }
    // A part can have only one repetition. If a part has two repetitions, as in x{2}{3}, the part
    // with the first repetition becomes a group.
    if (part.low != 1 || part.high != 1) {
      GrammarPart group{GrammarPart::group};
      group.at = part.at;
      group.choices.emplace_back().push_back(std::move(part));
      part = std::move(group);
    }
    part.low = low, part.high = high;
  }

  uint32_t count() {
    if (is_end() || text_[at_] < '0' || text_[at_] > '9') refuse_here("a count");
    uint32_t number = 0;
    for (; !is_end() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      number = 10 * number + static_cast<uint32_t>(text_[at_] - '0');
      if (number > kMostCount) refuse("a count above 1,000,000");
    }
    return number;
  }

  Node literal() {
    std::string spelled;
    for (++at_; !take("\"");) append_char(character("the \" of a text"), spelled);
    return expressions_.bytes(spelled);
  }

  CodePoints characters() {
    ++at_;
    const bool is_negated = take("^");
    CodePoints made;
    while (!take("]")) {
      const size_t at = at_;
      const char32_t low = character("the ] of a set");
      char32_t high = low;
      if (is_at('-') && text_.substr(at_, 2) != "-]") {
        ++at_;
        high = character("the ] of a set");
      }
      if (low > high) refuse_grammar(text_, at, "a range of characters ends below its start");
      made.push_back({low, high});
    }
    made = normalised(std::move(made));
    return is_negated ? complement(made) : made;
  }

  // Parses one character inside a quoted text or a set. The character may be escaped.
  char32_t character(const char* end) {
    if (is_end()) refuse_here(end);
    if (!take("\\")) return next_char(text_, at_);
    const size_t at = at_ - 1;
    const char letter = is_end() ? '\0' : text_[at_++];
    switch (letter) {
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 't':
        return '\t';
      case '\\':
      case '"':
      case '[':
      case ']':
        return static_cast<char32_t>(letter);
      case 'x':
        return hexadecimal(2, at);
      case 'u':
        return hexadecimal(4, at);
      case 'U':
        return hexadecimal(8, at);
      default:
        refuse_grammar(text_, at,
                       "an unknown escape: \\n, \\r, \\t, \\\\, \\\", \\[, \\], \\xHH, "
                       "\\uHHHH and \\UHHHHHHHH are known");
    }
  }

  char32_t hexadecimal(size_t digits, size_t at) {
    uint64_t point = 0;
    for (size_t i = 0; i < digits; ++i, ++at_) {
      const char letter = is_end() ? '\0' : text_[at_];
      const int value = letter >= '0' && letter <= '9'   ? letter - '0'
                        : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10
                        : letter >= 'A' && letter <= 'F' ? letter - 'A' + 10
                                                         : -1;
      if (value < 0) refuse_here(std::to_string(digits) + " hexadecimal digits");
      point = 16 * point + static_cast<uint64_t>(value);
    }
    if (point >= kCodePoints || !is_scalar(static_cast<int32_t>(point)))
      refuse_grammar(text_, at, "an escape that is not a character");
    return static_cast<char32_t>(point);
  }

  Expressions& expressions_;
  const std::string_view text_;
  size_t at_ = 0;
  std::vector<GrammarRule> rules_;
  std::unordered_map<std::string, uint32_t> numbers_;
};

}  // namespace

GrammarText read_grammar(Expressions& expressions, std::string_view text) {
  return GrammarReader(expressions, text).read();
}

void refuse_grammar(std::string_view text, size_t at, const std::string& why) {
  const std::string_view before = text.substr(0, at);
  const size_t line = static_cast<size_t>(std::count(before.begin(), before.end(), '\n')) + 1;
  const size_t start = before.rfind('\n') + 1;  // npos + 1 is 0 if there is no line break
  const size_t column = 1 + count_chars(before.substr(start));
  throw Error(DLM_INVALID_ARGUMENT, "grammar: line " + std::to_string(line) + ", column " +
                                        std::to_string(column) + ": " + why);
}

}  // namespace dlm::compile
