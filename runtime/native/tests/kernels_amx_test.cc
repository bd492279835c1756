// Tests of find_amx_refusal and multiplies_rightly. They cover each reason for not using AMX, and
// the check that the kernels multiply correctly.
#include <cerrno>

#include "kernels/x86/amx.h"
#include "kernels_test.h"

namespace kernels_test {
namespace {

int asked = 0, proven = 0;  // how often request() and prove() were called

dlm::AmxHost make_host() {
  asked = proven = 0;
  return {3u << 24, true, 3u << 17 | 0xe7, [] { return ++asked, 0; },
          [] { return ++proven, true; }};
}

void test_everything_that_stands_in_the_way_is_named(Tally& tally) {
  const auto check = [&](dlm::AmxHost host, const std::string& refusal, int asks, int proofs) {
    tally.about = dlm::find_amx_refusal(host);
    CHECK(tally.about == refusal);
    CHECK(asked == asks && proven == proofs);  // no further check was made after the first failure
  };
  dlm::AmxHost host = make_host();
  check(host, "", 1, 1);
  host = make_host(), host.features ^= 1u << 24;
  check(host, "the processor has no amx-tile", 0, 0);
  host = make_host(), host.features ^= 1u << 25;
  check(host, "the processor has no amx-int8", 0, 0);
  host = make_host(), host.has_avx512_vnni = false;
  check(host, "the processor has no AVX-512 with VNNI", 0, 0);
  for (const int bit : {17, 18}) {
    host = make_host(), host.saved_state ^= 1u << bit;
    check(host, "the system does not keep AMX's registers (bits 17 and 18 of XCR0)", 0, 0);
  }
  host = make_host(), host.request = [] { return ++asked, EPERM; };
  check(host, "the system does not grant AMX's registers: Operation not permitted", 1, 0);
  host = make_host(), host.prove = [] { return ++proven, false; };
  check(host, "a test of AMX multiplication gave wrong results", 1, 1);
}

// ---- The multiplication test ----

const dlm::Kernels* whole = nullptr;
// multiply_wrongly changes one result of layers with the group size spoilt_format: the result with
// the index spoilt_at, counted from the end
int64_t spoilt_format = 0, spoilt_at = 0;

void multiply_wrongly(const dlm::Linear& layer, void* scratch, dlm::Parallel& parallel) {
  whole->linear(layer, scratch, parallel);
  if (layer.group_size == spoilt_format)
    layer.outputs[0][layer.rows * layer.weights[0].columns - spoilt_at] += 1;
}

void test_the_proof_sees_one_wrong_number(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  CHECK(dlm::multiplies_rightly(kernels));
  whole = &kernels;
  dlm::Kernels spoilt = kernels;
  spoilt.linear = multiply_wrongly;
  for (const int64_t format : {0, 32})
    for (const int64_t at : {1, 33, 33 * 33}) {
      spoilt_format = format, spoilt_at = at;
      CHECK(!dlm::multiplies_rightly(spoilt));
    }
}

}  // namespace

void test_amx(Tally& tally, const dlm::Kernels& any) {
  test_everything_that_stands_in_the_way_is_named(tally);
  test_the_proof_sees_one_wrong_number(tally, any);
}

}  // namespace kernels_test
