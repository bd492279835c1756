// Defines Automaton, a compiled constraint. An automaton reads token ids, and accepts exactly the
// texts that the constraint allows.
//
// The folder compile/ builds automata. Two tokens are in the same class if both tokens lead to the
// same next state from every state. A group consists of all classes that lead from one state to the
// same next state. So the work after each pass depends on the numbers of classes and groups, not on
// the number of tokens.
//
// An automaton can be stored in a file. All its numbers are little-endian. The file has these
// parts:
//   - the magic "DLMAUTO" and the version 1
//   - six int32 counts: tokens in the vocabulary, states, classes, groups, classes in all groups,
//     and edges
//   - 32 bytes that identify the source of the constraint
//   - the first seven arrays of the struct, in order
//   - the SHA-256 of all earlier parts
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/view.h"

namespace dlm {

struct Automaton {
  int32_t vocab_size, states, classes, groups;
  // [V]: the class of each token, or -1 if no state accepts the token.
  std::vector<int32_t> token_class;
  // Some arrays contain several lists, one after another. The array named ..._starts contains the
  // start of each list. The arrays that are declared directly after ..._starts contain the elements
  // of the lists. List i consists of the elements with the indices starts[i] to starts[i + 1] - 1.
  std::vector<int32_t> group_starts, group_classes;
  std::vector<int32_t> edge_starts;
  // For each edge: the next state, and the group of tokens that leads to the next state.
  std::vector<int32_t> edge_states, edge_groups;
  // For each state: the smallest number of tokens from the state to the end of a text. 0 means that
  // a text may end in this state.
  std::vector<int32_t> distances;
  std::vector<int32_t> class_starts, class_tokens;
  // True if a token may follow the end of every text and lead to the end of a text again. End
  // tokens do so. Then a shorter text also fits into a longer range of positions.
  bool is_padded = true;
  std::array<uint8_t, 32> made_of{};  // hash of the source from which the automaton was compiled

  // The next arrays are only for decisions (compile/tokens/decisions.h). For other constraints,
  // they are empty. The options of all questions are numbered consecutively: question q has the
  // options question_starts[q] to question_starts[q + 1] - 1. For each state, `tags` lists the
  // options that a text completes when the text arrives in the state. These arrays are not stored
  // in the automaton's file.
  std::vector<int32_t> question_starts, tag_starts, tags;

  struct Edge {
    int32_t state, group;
  };
  // The edges of a state. This type works with range-based for loops.
  struct Edges {
    struct Iterator {
      const int32_t *state, *group;
      Edge operator*() const { return {*state, *group}; }
      Iterator& operator++() { return ++state, ++group, *this; }
      bool operator!=(const Iterator& other) const { return state != other.state; }
    };
    Iterator first, last;
    Iterator begin() const { return first; }
    Iterator end() const { return last; }
  };
  Edges edges(int32_t state) const {
    const int32_t first = edge_starts[state], last = edge_starts[state + 1];
    return {{edge_states.data() + first, edge_groups.data() + first},
            {edge_states.data() + last, edge_groups.data() + last}};
  }

  // classes_of() returns the classes of a group. tokens_of() returns the tokens of a class. Both
  // lists are in ascending order.
  View<int32_t> classes_of(int32_t group) const {
    const auto first = static_cast<size_t>(group_starts[group]);
    return {group_classes.data() + first, static_cast<size_t>(group_starts[group + 1]) - first};
  }
  View<int32_t> tokens_of(int32_t number) const {
    const auto first = static_cast<size_t>(class_starts[number]);
    return {class_tokens.data() + first, static_cast<size_t>(class_starts[number + 1]) - first};
  }

  // Returns the total number of options of all questions. The number is 0 if the constraint is not
  // a decision.
  int32_t options() const { return question_starts.empty() ? 0 : question_starts.back(); }
  View<int32_t> tags_of(int32_t state) const {
    const auto first = static_cast<size_t>(tag_starts[state]);
    return {tags.data() + first, static_cast<size_t>(tag_starts[state + 1]) - first};
  }

  // Returns the state to which `token` leads from `state`, or -1 if the token is not allowed. A
  // text starts in state 0.
  int32_t next(int32_t state, int32_t token) const;
  bool has_class(int32_t group, int32_t number) const;
  // Returns true if the group contains the token. Returns false if `token` is -1.
  bool has_token(int32_t group, int32_t token) const;
};

// Computes class_starts, class_tokens and is_padded from the other fields of the automaton.
void complete_tables(Automaton& automaton);

// Returns the size of the automaton's file in bytes.
size_t file_size(const Automaton& automaton);

// Returns the content of the automaton's file.
std::vector<uint8_t> write_automaton(const Automaton& automaton);

// Reads an automaton from a file's content. Checks all numbers, so that later code can rely on
// them. Error messages start with `where`. Throws an Error with status DLM_BAD_BUNDLE if the
// content is not valid. Throws an Error with status DLM_UNSUPPORTED if the version of the file is
// unknown.
Automaton read_automaton(const void* data, size_t size, const std::string& where);

// Reads and checks the file at `path`. Throws the same errors as read_automaton(). Also throws an
// Error with status DLM_NOT_FOUND if the file is missing.
Automaton open_automaton(const std::string& path);

}  // namespace dlm
