#include "compile/constraint.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "compile/automata/automata.h"
#include "compile/grammar/grammar.h"
#include "compile/regex/regex.h"
#include "compile/schema/schema.h"
#include "compile/tokens/decisions.h"
#include "compile/tokens/token_automaton.h"

namespace dlm::compile {
namespace {

const char* name_of(Constraint::Kind kind) {
  if (kind == Constraint::decisions) return "decisions";
  constexpr const char* kNames[] = {"regex",       "schema",     "enum",
                                    "json_object", "constraint", "grammar"};
  return kNames[kind];
}

schema::Texts texts_of(Expressions& expressions, const Constraint& constraint, double most_states) {
  schema::Options options;
  options.most_states = most_states;
  options.layout = constraint.layout;
  options.max_depth = constraint.max_depth;
  options.any_order = constraint.any_order;
  options.more_properties = constraint.more_properties;
  switch (constraint.kind) {
    case Constraint::regex:
      return {regex(expressions, constraint.content), {}, 0, true};
    case Constraint::schema:
      return schema::schema_texts(expressions, constraint.content, options);
    case Constraint::list:
      return schema::listed_texts(expressions, constraint.content);
    case Constraint::json_object:
      return schema::object_texts(expressions, options);
    case Constraint::tree:
      return schema::tree_texts(expressions, constraint.content, options);
    case Constraint::grammar:
      return {grammar(expressions, constraint.content, constraint.max_depth), {}};
    case Constraint::decisions:
      break;  // compile_constraint() handles this kind
  }
  fail(DLM_INTERNAL, "a constraint of kind %d", static_cast<int>(constraint.kind));
}

// Returns a hint about the JSON layout. The hint is for the error message that says that no text of
// the constraint starts with `before`.
std::string layout_hint(const Constraint& constraint) {
  if (constraint.kind == Constraint::regex || constraint.kind == Constraint::list ||
      constraint.kind == Constraint::grammar)
    return "";
  const auto example = json::parse("[{\"a\":1,\"b\":2},{}]", 64);
  return ": the JSON layout writes " +
         json::quoted(schema::text_of(*example, constraint.layout, 0)) +
         ", and properties are in the schema's order";
}

// Returns true if the text consists of spaces and line breaks.
bool is_space(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

// Turns the name of an added token into the bytes that stand for the token.
void name(std::string& token) {
  if (!token.empty() && token.front() != kNamed) token.insert(token.begin(), kNamed);
}

}  // namespace

Compiled compile_constraint(const Constraint& constraint, const Vocabulary& vocabulary) {
  Budget budget(constraint.limits, name_of(constraint.kind));
  if (constraint.kind == Constraint::decisions) {
    if (!constraint.before.empty() || !constraint.behind.empty())
      fail(DLM_INVALID_ARGUMENT, "decisions: put the text of before and behind into parts");
    return {decisions(constraint.content, vocabulary, budget), {}};
  }
  // For a JSON Schema, texts_of() reduces nesting depths and string lengths until the estimated
  // number of states is at most `most_states` (0: the default). The estimate may be too low. So if
  // the automaton is too large, the loop tries again with a smaller `most_states`.
  for (double most_states = 0;;) {
    Expressions expressions(budget);
    schema::Texts texts = texts_of(expressions, constraint, most_states);
    try {
      Automata automata(expressions);
      const ByteAutomaton& whole = automata.of(texts.node);
      if (whole.is_empty())
        throw Error(DLM_INVALID_ARGUMENT,
                    texts.none.empty()
                        ? name_of(constraint.kind) + std::string(": no text matches it")
                        : texts.none);
      const ByteAutomaton bytes =
          between(whole, constraint.before, constraint.behind, layout_hint(constraint), budget);
      return {token_automaton(bytes, vocabulary, budget), std::move(texts.warnings)};
    } catch (const TooLarge&) {
      if (texts.is_smallest) throw;
    }
    constexpr double kSmaller = 8;
    most_states = (most_states > 0 ? std::min(most_states, texts.size) : texts.size) / kSmaller;
  }
}

std::unique_ptr<const Vocabulary> read_vocabulary(std::shared_ptr<const Text> text,
                                                  int32_t vocab_size, std::vector<int32_t> ends) {
  const TextFile& file = text->file();
  std::vector<std::string> tokens(static_cast<size_t>(std::min(vocab_size, file.vocab_size)));
  for (size_t token = 0; token < tokens.size(); ++token)
    if (file.tokens[token].find(kNamed) == std::string_view::npos)
      tokens[token] = std::string(file.tokens[token]);
  for (size_t token = 0; token < tokens.size(); ++token)
    if ((file.token_flags[token] & TextFile::special) != 0) name(tokens[token]);
  for (const int32_t added : file.added_ids)
    if (added >= 0 && static_cast<size_t>(added) < tokens.size() && !is_space(file.tokens[added]))
      name(tokens[static_cast<size_t>(added)]);
  std::vector<std::string> starts;
  if (file.strips_space) {
    starts = tokens;
    for (size_t token = 0; token < starts.size(); ++token) {
      if ((file.token_flags[token] & TextFile::continues) != 0)
        starts[token].insert(0, kContinues);
      else if (!starts[token].empty() && starts[token].front() == ' ')
        starts[token].erase(0, 1);
    }
  }
  return std::make_unique<const Vocabulary>(
      std::move(tokens), std::move(starts), vocab_size, std::move(ends),
      [text](std::string_view wanted, bool is_start) {
        std::vector<int32_t> ids;
        try {
          text->encode(wanted, {false, false, !is_start}, ids);
        } catch (const Error&) {
          return -1;  // encode() throws an error if the text contains a special token
        }
        return ids.empty() ? -1 : ids.front();
      });
}

}  // namespace dlm::compile
