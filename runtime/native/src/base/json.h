// A strict JSON reader (RFC 8259), for text that may be damaged or hostile.
//
// Beyond the RFC it rejects byte order marks, invalid UTF-8, unpaired surrogates, escaped NUL
// (strings become C strings), numbers that overflow a double, duplicate keys, and nesting
// (kMaxDepth by default) or text above the caller's limits. Every failure is Error(DLM_BAD_BUNDLE).
// Syntax errors start with "line N: ". Accessors name the value by its path: `denoiser.layers:
// expected an integer in 1..65536, found "x"`. Quoted text is escaped and cut to 60 characters.
//
// A value takes about 120 bytes, so reading n bytes of text may take 100 n bytes of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace dlm::json {

constexpr int kMaxDepth = 64;

// `text` for a message: in double quotes, non-ASCII and controls escaped, cut to 60 characters.
std::string quoted(std::string_view text);

class Value {
 public:
  enum class Kind : uint8_t { null, boolean, number, string, array, object };

  Value() = default;
  Value(Value&&) = default;
  Value& operator=(Value&&) = default;
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;

  Kind kind() const { return kind_; }

  // key: of an object's member, otherwise "". line: where the value starts, from 1.
  const std::string& key() const { return key_; }
  int32_t line() const { return line_; }

  // The value's path for messages, such as presets[0].block_length.
  std::string path() const;
  // Throws "<path>: <reason>", for checks in the caller's code.
  [[noreturn]] void refuse(const std::string& reason) const;

  // The value as this type; any other type is an error.
  bool boolean() const;
  double number(double low, double high) const;      // low..high, both included
  int64_t integer(int64_t low, int64_t high) const;  // written without fraction and exponent
  const std::string& string() const;
  const std::string& written() const { return text_; }  // of a number: as in the text
  const std::vector<Value>& elements() const;           // of an array
  const std::vector<Value>& members() const;  // of an object, in file order, each with its key()

  // Members of an object. find returns nullptr if the key is missing; the others throw.
  const Value* find(std::string_view key) const;
  const Value& at(std::string_view key) const;
  bool boolean(std::string_view key) const { return at(key).boolean(); }
  int64_t integer(std::string_view key, int64_t low, int64_t high) const {
    return at(key).integer(low, high);
  }
  const std::string& string(std::string_view key) const { return at(key).string(); }
  const std::vector<Value>& array(std::string_view key) const { return at(key).elements(); }
  const Value& object(std::string_view key) const;

  // The canonical text: keys sorted, no white space, integers in decimal. `without` names a member
  // to leave out. Throws for fractions and for text beyond printable ASCII.
  // Equals Python's json.dumps(value, sort_keys=True, separators=(",", ":")).
  std::string canonical(std::string_view without = {}) const;

  // Throws for the first member whose key is not in `known`: skipping it would change the meaning.
  void refuse_unknown(const std::vector<std::string_view>& known) const;

 private:
  friend class Reader;
  void append_canonical(std::string& out, std::string_view without) const;
  std::string found() const;
  [[noreturn]] void expected(const std::string& what) const;

  Kind kind_ = Kind::null;
  bool truth_ = false;
  bool is_integer_ = false;
  int32_t line_ = 0;
  int64_t integer_ = 0;
  double number_ = 0;
  const Value* parent_ = nullptr;  // set once the tree no longer moves; the root owns everything
  std::string key_;
  std::string text_;  // of a string; of a number as it was written
  std::vector<Value> items_;
};

// Reads exactly one value. max_bytes limits the text, max_depth its nesting.
std::unique_ptr<const Value> parse(std::string_view text, size_t max_bytes,
                                   int max_depth = kMaxDepth);

}  // namespace dlm::json
