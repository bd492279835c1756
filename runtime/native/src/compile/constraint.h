// Compiles a constraint, such as a regular expression or a JSON Schema, to an automaton over token
// ids. The decoding loop uses this automaton to find the tokens that are allowed next.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/automata/budget.h"
#include "compile/schema/layout.h"
#include "compile/tokens/vocabulary.h"
#include "constraints/automaton.h"
#include "text/tokenizer.h"

namespace dlm::compile {

struct Constraint {
  // The values equal the constants DLM_CONSTRAINT_... in dlm_runtime.h.
  enum Kind { regex, schema, list, json_object, tree, grammar, decisions = 8 };

  Kind kind;
  std::string_view content;
  // Fixed texts before and after the generated text. The constraint applies to `before`, the
  // generated text and `behind` as one text.
  std::string before, behind;
  schema::Layout layout;
  std::optional<uint32_t> max_depth;
  bool any_order = false, more_properties = false;  // these apply to JSON objects, see schema.h
  Limits limits;
};

struct Compiled {
  Automaton automaton;
  std::vector<std::string> warnings;
};

// Compiles a constraint. Throws an Error with status DLM_INVALID_ARGUMENT if the content is not
// valid or not supported, or if compiling exceeds a limit.
Compiled compile_constraint(const Constraint& constraint, const Vocabulary& vocabulary);

// Reads the vocabulary of a compiled text file. Throws an Error with status DLM_UNSUPPORTED if the
// tokenizer is not byte-level.
std::unique_ptr<const Vocabulary> read_vocabulary(std::shared_ptr<const Text> text,
                                                  int32_t vocab_size, std::vector<int32_t> ends);

}  // namespace dlm::compile
