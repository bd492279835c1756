// Expressions with conditions on what is around a place: anchors, word boundaries, look-ahead and
// look-behind. The parsers of both syntaxes build pieces of them, and node() makes languages of
// these, without copying the parts that have no conditions.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "compile/expression.h"

namespace dlm::compile {

// A condition on the characters beside a place. Each of the two is one of four kinds: 0: there is
// none, the text ends; 1: of the first set; 2: of the second set; 3: another.
struct Look {
  std::array<CodePoints, 2> before, after;
  std::array<std::array<bool, 4>, 4> holds{};  // [kind before][kind after]
};

class Looks {
 public:
  // How texts spell the characters: a node for one character of a set.
  using Spell = Node (*)(Expressions&, const CodePoints&);

  // `subject` opens the messages of errors, as in "regex".
  Looks(Expressions& expressions, Spell spell, std::string subject);

  // A part of an expression. Parts without conditions are nodes.
  struct Piece {
    Node node = 0;
    uint32_t item = 0;  // 0: a node
  };
  Piece plain(Node node) const { return {node, 0}; }
  Piece look(Look look);
  // What follows starts with `piece` ("ahead"), or does not.
  Piece ahead(Piece piece, bool is_negative);
  Piece sequence(std::vector<Piece> parts);
  Piece either(std::vector<Piece> choices);
  Piece repeat(Piece part, uint32_t low, uint32_t high);

  // The whole texts that match. To be called once, at the end.
  Node node(Piece piece);

 private:
  enum class Kind : uint8_t { look, ahead, sequence, either, repeat };
  struct Item {
    Kind kind = Kind::look;
    bool looks_before = false, looks_after = false, looks_far = false, is_negative = false;
    uint32_t low = 0, high = 0;
    std::vector<Piece> parts = {};
    Look look = {};
    std::vector<Node> steps = {};  // of an endless repetition: from each boundary to each
  };
  // The languages of all that is from a place on, by what is before it: 0: nothing; otherwise one
  // of the classes before, from 1 on.
  using Rest = std::vector<Node>;
  // Item, its part or fewest repetitions, most repetitions, and what is before and after: 0: the
  // end of the text; from 1 on: classes.
  using Key = std::tuple<uint32_t, size_t, uint32_t, size_t, size_t>;

  Piece add(Item item);
  bool looks_before(Piece piece) const { return items_[piece.item].looks_before; }
  bool looks_after(Piece piece) const { return items_[piece.item].looks_after; }
  void divide(const std::array<CodePoints, 2>& sets, std::vector<CodePoints>& classes) const;
  static size_t kind_of(const std::array<CodePoints, 2>& sets,
                        const std::vector<CodePoints>& classes, size_t place);
  bool holds(const Look& look, size_t before, size_t after) const;

  enum class Side : uint8_t { start, end };
  // Texts of `node` that are not empty; of these those that start with a character of one of the
  // classes after, or end with one of the classes before. Bit i of `classes` is class i + 1.
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
  // Places between two repetitions, which differ by what is before and after them.
  size_t classes_before(const Item& item) const { return item.looks_before ? before_.size() : 1; }
  size_t classes_after(const Item& item) const { return item.looks_after ? after_.size() : 1; }
  [[noreturn]] void refuse(const char* what) const;

  Expressions& expressions_;
  const Spell spell_;
  const std::string subject_;
  std::vector<Item> items_{Item{}};         // the first stands for none
  std::vector<CodePoints> before_, after_;  // classes: all characters of one are alike to all looks
  Node any_texts_ = 0;                      // of any length
  int depth_ = 0;
  std::map<Key, Node> known_;
  std::map<std::tuple<Node, Side, uint64_t>, Node> known_edges_;
};

}  // namespace dlm::compile
