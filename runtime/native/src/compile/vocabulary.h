// A tree of the texts of a tokenizer's tokens, used by the walks of token_walks.h.
//
// The tree is exact only for byte-level vocabularies. In such a vocabulary, each token is a string
// of bytes, and the bytes of a text are the bytes of its tokens.
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

// The class of each byte. -1 for bytes that are left out.
using ByteClasses = std::array<int16_t, 256>;

// A tree of the prefixes of all tokens. Parents come before their children. The children of a node
// differ in their last byte, or in the class of that byte.
struct TokenTree {
  std::vector<uint8_t> bytes;   // [nodes]: the last byte, or the lowest one of its class
  std::vector<int32_t> depths;  // [nodes]: length in bytes
  std::vector<int32_t> behind;  // [nodes]: the first node after its subtree
  std::vector<int32_t> token_starts, tokens;  // node n has [starts[n], starts[n + 1])
  // Empty in a tree by bytes. In a tree by classes, node n merges several nodes of the tree by
  // bytes: nodes[node_starts[n]] to nodes[node_starts[n + 1] - 1].
  std::vector<int32_t> node_starts, nodes;

  int32_t size() const { return static_cast<int32_t>(bytes.size()); }
  bool has_tokens(int32_t node) const {
    return token_starts[static_cast<size_t>(node)] < token_starts[static_cast<size_t>(node) + 1];
  }
};

class Vocabulary {
 public:
  // Returns the first token of the tokenized text, or -1.
  using FirstToken = std::function<int32_t(std::string_view text)>;

  // `tokens` has the text of each id. It is empty for tokens that never occur inside a text. `ends`
  // has the end tokens, which may follow a text; there must be at least one. Throws
  // Error(DLM_INVALID_ARGUMENT).
  Vocabulary(std::vector<std::string> tokens, int32_t vocab_size, std::vector<int32_t> ends,
             FirstToken first_token);
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  int32_t vocab_size() const { return vocab_size_; }
  const std::vector<int32_t>& ends() const { return ends_; }
  const TokenTree& tree() const { return tree_; }

  // Returns the node of the first token of the tokenized text. Returns -1 if that token is unknown
  // or if the text does not start with it.
  int32_t first_node(std::string_view text) const;

  // Returns the tree of tokens in which bytes of one class are not told apart. The trees that were
  // used last are cached. Any number of threads may call this.
  std::shared_ptr<const TokenTree> by_classes(const ByteClasses& classes, Budget& budget) const;

 private:
  TokenTree collapsed(const ByteClasses& classes, Budget& budget) const;

  const std::vector<std::string> tokens_;
  const int32_t vocab_size_;
  const std::vector<int32_t> ends_;
  const FirstToken first_token_;
  TokenTree tree_;
  std::vector<int32_t> node_of_;  // [vocab_size]: -1 if the token has no node

  struct Kept {
    ByteClasses classes;
    std::shared_ptr<const TokenTree> tree;
  };
  mutable std::mutex mutex_;
  mutable std::list<Kept> kept_;  // most recently used first
};

}  // namespace dlm::compile
