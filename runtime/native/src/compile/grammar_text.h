// Reads the text of a grammar in GBNF: its rules, and which parts they have.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compile/expression.h"

namespace dlm::compile {

struct GrammarPart;
using GrammarSequence = std::vector<GrammarPart>;
using GrammarChoices = std::vector<GrammarSequence>;

struct GrammarPart {
  enum Kind : uint8_t { node, rule, group } kind;
  Node texts = 0;               // of `node`
  uint32_t number = 0;          // of `rule`: its index
  GrammarChoices choices = {};  // of `group`
  uint32_t low = 1, high = 1;   // how often it is there
  size_t at = 0;                // where it starts in the text
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

// Throws an Error as `refuse_grammar` does.
GrammarText read_grammar(Expressions& expressions, std::string_view text);

// Throws Error(DLM_INVALID_ARGUMENT): "grammar: line L, column C: " and the reason.
[[noreturn]] void refuse_grammar(std::string_view text, size_t at, const std::string& why);

}  // namespace dlm::compile
