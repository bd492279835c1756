// Tests of tied heads with every type of table. Results must equal those of plain loops within a
// tolerance.
#include "kernels_test.h"

namespace kernels_test {
namespace {

constexpr dlm::TableType kTypes[] = {dlm::TableType::fp32, dlm::TableType::bf16,
                                     dlm::TableType::fp16, dlm::TableType::fp8};

double value_of_e4m3(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

double value_of_fp16(int code) {
  const int exponent = code >> 10 & 31, fraction = code & 1023;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (code & 0x8000) != 0 ? -size : size;
}

// A table in the kernels' layout, and the same numbers as floats.
struct Table {
  dlm::TableType type;
  int64_t rows, inputs;
  std::vector<uint8_t> bytes;
  std::vector<double> values;
  Floats scales;

  Table(Numbers& numbers, dlm::TableType its, int64_t N, int64_t K)
      : type(its), rows(N), inputs(K) {
    const auto put = [&](auto element) {
      const size_t at = bytes.size();
      bytes.resize(at + sizeof element);
      std::memcpy(bytes.data() + at, &element, sizeof element);
    };
    for (int64_t i = 0; i < N * K; ++i) {
      if (type == dlm::TableType::fp32) {
        const float one = numbers.normal();
        put(one), values.push_back(one);
      } else if (type == dlm::TableType::bf16) {
        const float one = numbers.normal();
        uint32_t bits;
        std::memcpy(&bits, &one, sizeof bits);
        bits &= 0xffff0000u;
        float kept;
        std::memcpy(&kept, &bits, sizeof kept);
        put(static_cast<uint16_t>(bits >> 16)), values.push_back(kept);
      } else if (type == dlm::TableType::fp16) {
        const auto code =
            static_cast<uint16_t>(numbers.below(0x7c00) | numbers.below(2) << 15);  // any finite
                                                                                    // number
        put(code), values.push_back(value_of_fp16(code));
      } else {
        const auto code = static_cast<uint8_t>(numbers.below(0x7f) | numbers.below(2) << 7);
        put(code), values.push_back(value_of_e4m3(code));
      }
    }
    if (type == dlm::TableType::fp8) scales = numbers.normals(N);
  }

  Floats run(const dlm::Kernels& kernels, dlm::Parallel& parallel, const Floats& x,
             int64_t count) const {
    Floats y(static_cast<size_t>(count * rows), 12345.0f);
    kernels.tied_head({x.data(), count, inputs, rows, type, bytes.data(),
                       scales.empty() ? nullptr : scales.data(), y.data()},
                      parallel);
    return y;
  }
};

void check_head(Tally& tally, const dlm::Kernels& kernels, const Table& table, const Floats& x,
                int64_t rows) {
  InOrder in_order;
  const Floats y = table.run(kernels, in_order, x, rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < table.rows; ++n) {
      double sum = 0, size = 1e-30;
      for (int64_t k = 0; k < table.inputs; ++k) {
        const double product = static_cast<double>(x[static_cast<size_t>(r * table.inputs + k)]) *
                               table.values[static_cast<size_t>(n * table.inputs + k)];
        sum += product, size += std::abs(product);
      }
      const double scale = table.scales.empty() ? 1 : table.scales[static_cast<size_t>(n)];
      // The tolerance allows for fp32 sums of a few hundred products in any order.
      CHECK(std::abs(y[static_cast<size_t>(r * table.rows + n)] - sum * scale) <=
            1e-6 * size * std::abs(scale));
    }
}

void test_shapes(Tally& tally, const dlm::Kernels& kernels, dlm::TableType type) {
  Numbers numbers(21);
  const std::string name = std::string(kernels.name) + ", type " + std::to_string(int(type));
  for (int64_t rows = 0; rows <= 26; ++rows)
    for (const int64_t K : {1, 15, 16, 33, 144}) {
      tally.about = name + ", " + std::to_string(rows) + " rows of " + std::to_string(K);
      const Table table(numbers, type, 1 + numbers.below(40), K);
      check_head(tally, kernels, table, numbers.normals(rows * K), rows);
    }
  for (const int64_t columns : {1, 2, 3, 4, 5, 63, 64, 65, 700}) {
    tally.about = name + ", " + std::to_string(columns) + " rows of the table";
    const Table table(numbers, type, columns, 40);
    check_head(tally, kernels, table, numbers.normals(3 * 40), 3);
  }
  tally.about = name + ", more rows than go together";
  const Table table(numbers, type, 13, 70);
  check_head(tally, kernels, table, numbers.normals(300 * 70), 300);
}

void test_what_is_not_finite_stays_in_its_row(Tally& tally, const dlm::Kernels& kernels,
                                              dlm::TableType type) {
  Numbers numbers(22);
  InOrder in_order;
  const Table table(numbers, type, 41, 50);
  for (const float bad : {kNan, kInfinity, -kInfinity})
    for (const int64_t at : {17, 49}) {
      Floats x = numbers.normals(15 * 50);
      x[static_cast<size_t>(13 * 50 + at)] = bad;
      const Floats y = table.run(kernels, in_order, x, 15);
      for (int64_t i = 0; i < 15 * 41; ++i)
        if (i / 41 != 13) CHECK(std::isfinite(y[static_cast<size_t>(i)]));
    }
}

void test_nan_in_e4m3(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  Numbers numbers(23);
  InOrder in_order;
  Table table(numbers, dlm::TableType::fp8, 9, 20);
  table.bytes[3 * 20 + 5] = 0x7f, table.bytes[8 * 20 + 19] = 0xff;
  const Floats y = table.run(kernels, in_order, numbers.normals(20), 1);
  for (size_t n = 0; n < 9; ++n) CHECK(std::isnan(y[n]) == (n == 3 || n == 8));
}

void test_order_of_tasks_does_not_change_a_bit(Tally& tally, const dlm::Kernels& kernels,
                                               dlm::TableType type) {
  tally.about = kernels.name;
  Numbers numbers(24);
  const Table table(numbers, type, 170, 96);
  const Floats x = numbers.normals(300 * 96);
  check_order_of_tasks(tally, [&](dlm::Parallel& parallel) {
    return std::vector<Floats>{table.run(kernels, parallel, x, 300)};
  });
}

}  // namespace

void test_tied_head(Tally& tally, const dlm::Kernels& kernels) {
  for (const dlm::TableType type : kTypes) {
    test_shapes(tally, kernels, type);
    test_what_is_not_finite_stays_in_its_row(tally, kernels, type);
    test_order_of_tasks_does_not_change_a_bit(tally, kernels, type);
  }
  test_nan_in_e4m3(tally, kernels);
}

}  // namespace kernels_test
