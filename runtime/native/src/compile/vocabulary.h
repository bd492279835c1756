// The texts of a tokenizer's tokens as a tree: what the token stage walks over.
//
// Only byte-level vocabularies are exact in this: each token is a string of bytes, and a text's
// bytes are those of its tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "compile/budget.h"

namespace dlm::compile {

// A class for each byte, -1 for bytes that are left out.
using ByteClasses = std::array<int16_t, 256>;

// Beginnings of tokens as nodes, each before those that go on from it. Nodes of one parent differ
// in their byte, or in the class of it.
struct TokenTree {
  std::vector<uint8_t> bytes;   // [nodes]: the last byte of each; of a class, its lowest
  std::vector<int32_t> depths;  // [nodes]: bytes
  std::vector<int32_t> behind;  // [nodes]: the next node that does not go on from it
  std::vector<int32_t> token_starts, tokens;  // the tokens of node n: [starts[n], starts[n + 1])
  // Of a tree by classes: the nodes of the tree by bytes that node n stands for.
  std::vector<int32_t> node_starts, nodes;

  int32_t size() const { return static_cast<int32_t>(bytes.size()); }
  bool has_tokens(int32_t node) const {
    return token_starts[static_cast<size_t>(node)] < token_starts[static_cast<size_t>(node) + 1];
  }
};

class Vocabulary {
 public:
  // The first token of a text by the tokenizer, or -1.
  using FirstToken = std::function<int32_t(std::string_view text)>;

  // tokens: the text of each id; empty: it never stands inside a text. `ends` are end tokens, which
  // stand behind texts; there must be one. Throws Error(DLM_INVALID_ARGUMENT).
  Vocabulary(std::vector<std::string> tokens, int32_t vocab_size, std::vector<int32_t> ends,
             FirstToken first_token);
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  int32_t vocab_size() const { return vocab_size_; }
  const std::vector<int32_t>& ends() const { return ends_; }
  const TokenTree& tree() const { return tree_; }

  // The node of the token that the tokenizer starts this text with; -1 if it is not known, or is
  // not how the text starts.
  int32_t first_node(std::string_view text) const;

  // The tree of tokens whose bytes are told apart by class only. The last ones are kept; any number
  // of threads may ask.
  std::shared_ptr<const TokenTree> by_classes(const ByteClasses& classes, Budget& budget) const;

 private:
  TokenTree collapsed(const ByteClasses& classes, Budget& budget) const;

  const std::vector<std::string> tokens_;
  const int32_t vocab_size_;
  const std::vector<int32_t> ends_;
  const FirstToken first_token_;
  TokenTree tree_;
  std::vector<int32_t> node_of_;  // [vocab_size], -1: none

  struct Kept {
    ByteClasses classes;
    std::shared_ptr<const TokenTree> tree;
  };
  mutable std::mutex mutex_;
  mutable std::list<Kept> kept_;  // the last used first
};

}  // namespace dlm::compile
