// Implements classifier-free guidance, which combines two predictions of the denoiser. One of them
// is computed with the prompt, and the other without the prompt.
//
// The guided logits are l = l_u + (w + 1)(l_c - l_u), as in LLaDA's loop (arXiv:2502.09992). Here w
// is the guidance scale, l_c are the logits with the prompt, and l_u are the logits without the
// prompt. To compute l_u, the denoiser runs a second canvas, in which mask tokens replace the
// prompt and all other tokens that the caller gave. One pass runs both canvases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// Computes guided logits. From these logits, also computes the candidates and entropies that an
// engine would return.
class Guided {
 public:
  // Computes the guided predictions of `rows` rows. `conditional` contains the predictions with the
  // prompt, and `unconditional` contains the logits [rows, V] without the prompt. The probabilities
  // of a row are NaN if any guided logit of the row is NaN or +inf, or if all of them are -inf.
  Predictions guide(const Denoiser& denoiser, double scale, const Predictions& conditional,
                    const float* unconditional, size_t rows);

  // Computes the predictions that belong to the logits [rows, V], which must stay in memory.
  Predictions predict(const Denoiser& denoiser, const float* logits, size_t rows);

 private:
  void rank(const Denoiser& denoiser, const float* logits, size_t row);

  std::vector<float> logits_, probs_, log_odds_, entropy_;
  std::vector<int32_t> tokens_;
};

}  // namespace dlm
