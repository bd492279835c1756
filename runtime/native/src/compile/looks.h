// Compiles expressions with conditions on neighbouring characters: anchors, word boundaries,
// look-ahead and look-behind. The parsers of both regex syntaxes build pieces, and node() turns a
// piece into a language. Parts without conditions are not copied.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "compile/expression.h"

namespace dlm::compile {

// A condition on the characters before and after a position. Each of the two characters is of one
// of four kinds. 0: no character, because the text ends there. 1: in the first set. 2: in the
// second set. 3: any other character.
struct Look {
  std::array<CodePoints, 2> before, after;
  std::array<std::array<bool, 4>, 4> holds{};  // [kind before][kind after]
};

class Looks {
 public:
  // Makes a node for one character of a set, in the spelling of the texts.
  using Spell = Node (*)(Expressions&, const CodePoints&);

  // `subject` is the start of error messages, for example "regex".
  Looks(Expressions& expressions, Spell spell, std::string subject);

  // A part of an expression. A part without conditions is a plain node.
  struct Piece {
    Node node = 0;
    uint32_t item = 0;  // 0: this is a plain node
  };
  Piece plain(Node node) const { return {node, 0}; }
  Piece look(Look look);
  // Requires that `piece` matches the text that follows, or does not match it if `is_negative`.
  Piece ahead(Piece piece, bool is_negative);
  Piece sequence(std::vector<Piece> parts);
  Piece either(std::vector<Piece> choices);
  Piece repeat(Piece part, uint32_t low, uint32_t high);

  // Returns all texts that `piece` matches as a whole. Call it once, after building all pieces.
  Node node(Piece piece);

 private:
  enum class Kind : uint8_t { look, ahead, sequence, either, repeat };
  struct Item {
    Kind kind = Kind::look;
    bool looks_before = false, looks_after = false, looks_far = false, is_negative = false;
    uint32_t low = 0, high = 0;
    std::vector<Piece> parts = {};
    Look look = {};
    std::vector<Node> steps = {};  // see close()
  };
  // The texts that can follow a position, indexed by the character before it. Index 0: no
  // character. Index 1 and up: the class of the character, from `before_`.
  using Rest = std::vector<Node>;
  // The item; the index of its part or its fewest repetitions; its most repetitions; the classes of
  // the characters before and after. Class 0 is the end of the text.
  using Key = std::tuple<uint32_t, size_t, uint32_t, size_t, size_t>;

  Piece add(Item item);
  bool looks_before(Piece piece) const { return items_[piece.item].looks_before; }
  bool looks_after(Piece piece) const { return items_[piece.item].looks_after; }
  void divide(const std::array<CodePoints, 2>& sets, std::vector<CodePoints>& classes) const;
  static size_t kind_of(const std::array<CodePoints, 2>& sets,
                        const std::vector<CodePoints>& classes, size_t place);
  bool holds(const Look& look, size_t before, size_t after) const;

  enum class Side : uint8_t { start, end };
  // not_empty() returns the texts of `node` except the empty one. edged() returns those of them
  // that start with a character of some classes of `after_`, or that end with a character of some
  // classes of `before_`. Bit i of `classes` selects class i + 1.
  Node not_empty(Node node, int depth = 0);
  Node edged(Node node, Side side, uint64_t classes);
  Node edged(Node node, Side side, const CodePoints& points, int depth);
  Node starting(Node node, size_t after) {
    return edged(node, Side::start, uint64_t{1} << (after - 1));
  }
  Node ending(Node node, size_t before) {
    return edged(node, Side::end, uint64_t{1} << (before - 1));
  }

  Rest rest_from(Piece piece, const Rest& rest);
  Rest rest_from_node(Node node, const Rest& rest);
  Rest rest_from_look(const Look& look, const Rest& rest);
  Rest rest_from_ahead(const Item& item, const Rest& rest);
  Rest rest_from_repeat(const Item& item, Piece piece, const Rest& rest);
  Rest rest_from_endless(Piece piece, const Rest& rest);
  Rest joined(const Rest& first, const Rest& second);

  Node texts(Piece piece, size_t before, size_t after);
  Node tail(const Item& item, Piece piece, size_t from, size_t before, size_t after);
  Node repeated(Piece piece, uint32_t low, uint32_t high, size_t before, size_t after);
  Node endless(Piece piece, size_t before, size_t after);
  void close(Item& item);
  template <class First, class Second>
  Node in_turn(const First& first, bool first_looks_after, const Second& second,
               bool second_looks_before, size_t before, size_t after);
  // The number of classes to tell apart at a position between two repetitions.
  size_t classes_before(const Item& item) const { return item.looks_before ? before_.size() : 1; }
  size_t classes_after(const Item& item) const { return item.looks_after ? after_.size() : 1; }
  [[noreturn]] void refuse(const char* what) const;

  Expressions& expressions_;
  const Spell spell_;
  const std::string subject_;
  std::vector<Item> items_{Item{}};         // index 0 is unused
  std::vector<CodePoints> before_, after_;  // no Look tells characters of one class apart
  Node any_texts_ = 0;                      // all texts of any length
  int depth_ = 0;
  std::map<Key, Node> known_;
  std::map<std::tuple<Node, Side, uint64_t>, Node> known_edges_;
};

}  // namespace dlm::compile
