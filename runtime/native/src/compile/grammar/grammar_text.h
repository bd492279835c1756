// Parses the text of a GBNF grammar into a syntax tree. grammar.h compiles the tree.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compile/automata/expression.h"

namespace dlm::compile {

struct GrammarPart;
using GrammarSequence = std::vector<GrammarPart>;
using GrammarChoices = std::vector<GrammarSequence>;

struct GrammarPart {
  enum Kind : uint8_t { node, rule, group } kind;
  Node texts = 0;       // for kind `node`: the expression for the texts that this part matches
  uint32_t number = 0;  // for kind `rule`: the index of the rule
  GrammarChoices choices = {};  // for kind `group`: alternatives in parentheses
  uint32_t low = 1, high = 1;   // minimum and maximum number of repetitions
  size_t at = 0;                // offset of the part in the grammar's text, in bytes
};

struct GrammarRule {
  std::string name;
  GrammarChoices choices;
  size_t at = 0;
  bool is_defined = false;
};

struct GrammarText {
  std::vector<GrammarRule> rules;
  uint32_t root;
};

// Parses a grammar. Calls refuse_grammar() if the text is not a valid grammar.
GrammarText read_grammar(Expressions& expressions, std::string_view text);

// Throws an Error with status DLM_INVALID_ARGUMENT and the message "grammar: line L, column C: " +
// `why`. `at` is a byte offset in `text`.
[[noreturn]] void refuse_grammar(std::string_view text, size_t at, const std::string& why);

}  // namespace dlm::compile
