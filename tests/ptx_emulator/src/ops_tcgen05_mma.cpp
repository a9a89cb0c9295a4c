// tcgen05.mma of kind::f16 and kind::f8f6f4 (dense, fp8 operands) and tcgen05.commit (PTX ISA 9.7.16.10, 9.7.16.12).
//
// The products, copies and commits of a CTA (of a pair, with .cta_group::2) run one after another. The accumulator of
// row m, column n lies
//   M 128, and M 256 of a pair (128 rows in each CTA)   in lane m, column n
//   M 64                                                in lane 32 (m / 16) + m % 16, column n
//   M 128 of a pair (64 rows in each CTA)               in lane m + 64 (n >= N / 2), column n % (N / 2)
#include <algorithm>
#include <cstring>

#include "address_operand.h"
#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "matrix_operand.h"
#include "opcode_table.h"
#include "tcgen05.h"
#include "tensor_memory.h"
#include "vectors.h"

namespace ptx_emulator {

namespace {

struct ProductData : InstructionData {
    uint32_t group = 1;
    bool half = true;  // kind::f16, else kind::f8f6f4
    bool a_in_tensor_memory = false;
    AddressOperand d, a_address;
    uint32_t a = 0, b = 0, instruction = 0;  // registers
};

// The instruction descriptor (PTX ISA 9.7.16.4.2).
struct Shape {
    ElementType a_type, b_type;
    bool negate_a, negate_b, a_mn_major, b_mn_major;
    uint32_t m, n;
};

Shape decode_descriptor(const ProductData& data, uint32_t bits) {
    auto bad = [&](const char* why) {
        raise(Fault::kIllegalInstruction, "instruction descriptor 0x%x: %s", bits, why);
    };
    if (bits & 7) bad("sparse operands are not supported");
    if (bits & (1u << 3 | 1u << 6 | 1u << 23 | 1u << 29 | 3u << 30)) bad("reserved bits are set");
    if ((bits >> 4 & 3) != 1) bad("only fp32 accumulators are supported");
    auto type = [&](uint32_t code) {
        if (code > 1) bad("unknown type of an operand");
        return data.half ? (code ? ElementType::kBf16 : ElementType::kF16)
                         : (code ? ElementType::kE5m2 : ElementType::kE4m3);
    };
    Shape s{};
    s.a_type = type(bits >> 7 & 7);
    s.b_type = type(bits >> 10 & 7);
    s.negate_a = bits >> 13 & 1;
    s.negate_b = bits >> 14 & 1;
    s.a_mn_major = bits >> 15 & 1;
    s.b_mn_major = bits >> 16 & 1;
    s.n = (bits >> 17 & 63) * 8;
    s.m = (bits >> 24 & 31) * 16;
    if (data.half && s.a_type != s.b_type) bad("f16 and bf16 do not go together");
    if (data.group == 1) {
        if (s.m != 64 && s.m != 128) bad("M must be 64 or 128");
        if (s.n < 8 || s.n > 256 || (s.m == 128 && s.n % 16)) bad("N must be a multiple of 8 (M 64) or 16, up to 256");
    } else {
        if (s.m != 128 && s.m != 256) bad("M of a pair must be 128 or 256");
        if (s.n < 32 || s.n > 256 || s.n % 32) bad("N of a pair must be a multiple of 32 from 32 to 256");
    }
    return s;
}

// One product as issued.
struct Product {
    const ProductData* data;
    Shape shape;
    uint32_t d, a_tensor;  // addresses of tensor memory
    uint64_t a, b;         // descriptors
    bool accumulate;
    uint32_t disabled[8];  // lanes of D that are not written
};

struct Layout {
    uint32_t rows, columns;  // of D in one CTA
    bool sparse_lanes, folded;
    Layout(const ProductData& data, const Shape& s)
        : rows(s.m / data.group),
          columns(data.group == 2 && s.m == 128 ? s.n / 2 : s.n),
          sparse_lanes(data.group == 1 && s.m == 64),
          folded(data.group == 2 && s.m == 128) {}
    uint32_t lane(uint32_t row) const { return sparse_lanes ? row / 16 * 32 + row % 16 : row; }
};

// A and B of one of the CTAs; B's rows are split between the CTAs of a pair.
MatrixOperand a_operand(const Product& p, const Layout& layout) {
    return {tcgen05_descriptor(p.a), p.shape.a_type, p.shape.a_mn_major, 0, layout.rows};
}
MatrixOperand b_operand(const Product& p) {
    return {tcgen05_descriptor(p.b), p.shape.b_type, p.shape.b_mn_major, 0, p.shape.n / p.data->group};
}

void run_product(Cta* const (&ctas)[2], const Product& p) {
    const Layout layout(*p.data, p.shape);
    const uint32_t depth = 32 / element_size(p.shape.b_type), n = p.shape.n, part = n / p.data->group;
    static thread_local std::vector<float> a, b, d;
    a.resize(size_t{layout.rows} * depth);
    b.resize(size_t{n} * depth);
    const uint32_t* disabled_end = p.disabled + 4 * p.data->group;
    // Rows side by side in lanes, all of them written: the tensor memory itself is the accumulator.
    const bool in_place = !layout.sparse_lanes && !layout.folded &&
                          std::all_of(p.disabled, disabled_end, [](uint32_t lanes) { return lanes == 0; });
    if (!in_place) d.resize(size_t{layout.rows} * n);
    for (uint32_t c = 0; c < p.data->group; ++c) b_operand(p).load(*ctas[c], &b[size_t{c} * part * depth]);
    if (p.shape.negate_b) std::transform(b.begin(), b.end(), b.begin(), [](float x) { return -x; });
    for (uint32_t c = 0; c < p.data->group; ++c) {
        Cta& cta = *ctas[c];
        TensorMemory& memory = cta.tensor_memory;
        if (p.data->a_in_tensor_memory) {
            const uint32_t size = element_size(p.shape.a_type), per_cell = 4 / size;
            for (uint32_t row = 0; row < layout.rows; ++row) {
                const uint32_t* cells = memory.at((p.a_tensor >> 16) + layout.lane(row), p.a_tensor & 0xffff);
                if (size == 2) {
                    for (uint32_t k = 0; k < depth; k += 8) {
                        const bool bf16 = p.shape.a_type == ElementType::kBf16;
                        const Float8 values = bf16 ? widen<true>(cells + k / 2) : widen<false>(cells + k / 2);
                        std::memcpy(&a[row * depth + k], &values, sizeof values);
                    }
                    continue;
                }
                for (uint32_t k = 0; k < depth; ++k) {
                    uint8_t bytes[4];
                    const uint32_t bits = cells[k / per_cell] >> (8 * size * (k % per_cell));
                    std::memcpy(bytes, &bits, 4);
                    a[row * depth + k] = widen_element(p.shape.a_type, bytes);
                }
            }
        } else {
            a_operand(p, layout).load(cta, a.data());
        }
        if (p.shape.negate_a) std::transform(a.begin(), a.end(), a.begin(), [](float x) { return -x; });
        auto cell = [&](uint32_t row, uint32_t column) {
            const uint32_t fold = layout.folded && column >= layout.columns ? 1 : 0;
            return memory.at(layout.lane(row) + 64 * fold, (p.d & 0xffff) + column - fold * layout.columns);
        };
        if (in_place) {
            multiply_accumulate(a.data(), b.data(), reinterpret_cast<float*>(cell(0, 0)), layout.rows, n, depth,
                                kTensorColumns, p.accumulate);
            continue;
        }
        if (p.accumulate) {
            for (uint32_t row = 0; row < layout.rows; ++row) {
                for (uint32_t half = 0; half < (layout.folded ? 2u : 1u); ++half) {
                    std::memcpy(&d[row * n + half * layout.columns], cell(row, half * layout.columns),
                                layout.columns * sizeof(float));
                }
            }
        }
        multiply_accumulate(a.data(), b.data(), d.data(), layout.rows, n, depth, n, p.accumulate);
        for (uint32_t row = 0; row < layout.rows; ++row) {
            for (uint32_t half = 0; half < (layout.folded ? 2u : 1u); ++half) {
                const uint32_t lane = layout.lane(row) + 64 * half;
                if (p.disabled[c * 4 + lane / 32] >> lane % 32 & 1) continue;
                std::memcpy(cell(row, half * layout.columns), &d[row * n + half * layout.columns],
                            layout.columns * sizeof(float));
            }
        }
    }
    ctas[0]->machine.progressed();
}

// Everything the product will touch, checked and told to the checker.
void check_and_record(Warp& warp, Cta* const (&ctas)[2], const Product& p) {
    const Layout layout(*p.data, p.shape);
    Checker& checker = warp.machine.checker;
    TensorMemoryAccess& access = warp.tensor_memory;
    access.make_streams(warp);
    AsyncAgent agent = checker.agent(warp, access.product_stream, access.product_epoch, true);
    agent.product = true;
    // Products of a warp follow each other: what the pipe was given earlier is ordered without a wait.
    if (checker.enabled()) {
        agent.knowledge.generic.raise_to(access.product_stream, access.product_epoch);
        agent.knowledge.tensor.raise_to(access.product_stream, access.product_epoch);
    }
    const uint32_t d_column = p.d & 0xffff;
    if ((p.d >> 16) % kTensorLanes) raise(Fault::kIllegalAddress, "the accumulator does not begin at lane 0");
    for (uint32_t c = 0; c < p.data->group; ++c) {
        Cta& cta = *ctas[c];
        require_running(warp, cta);
        cta.tensor_memory.check_access(warp, d_column, layout.columns);
        const uint32_t a_columns = 8;
        if (p.data->a_in_tensor_memory) cta.tensor_memory.check_access(warp, p.a_tensor & 0xffff, a_columns);
        if (!checker.enabled()) continue;
        b_operand(p).record(checker, agent, cta);
        if (p.data->a_in_tensor_memory) {
            checker.tensor_access(agent, cta, p.a_tensor & 0xffff, a_columns, 0, kTensorLanes, AccessKind::kRead,
                                  layout.sparse_lanes);
        } else {
            a_operand(p, layout).record(checker, agent, cta);
        }
        checker.tensor_access(agent, cta, d_column, layout.columns, 0, kTensorLanes, AccessKind::kWrite,
                              layout.sparse_lanes);
    }
}

void note_forms(Forms& forms, const Product& p) {
    const Layout layout(*p.data, p.shape);
    const std::string name = format("tcgen05.mma.cta_group::%u", p.data->group);
    forms.note(format("%s M %u N %u", name.c_str(), p.shape.m, p.shape.n));
    forms.note(format("tcgen05.mma %s x %s", name_of(p.shape.a_type), name_of(p.shape.b_type)));
    forms.note(name + " A in " +
               (p.data->a_in_tensor_memory ? format("tensor memory, M %u", p.shape.m)
                                           : "shared memory, " + a_operand(p, layout).form()));
    forms.note(name + " B in shared memory, " + b_operand(p).form());
    if (p.shape.negate_a || p.shape.negate_b) forms.note("tcgen05.mma with a negated operand");
}

// list[0]: disabled lanes; c: enable-input-d
Step multiply(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const ProductData&>(*i.data);
    const LaneMask enable = i.negate_predicate ? ~warp.predicate(i.c) : warp.predicate(i.c);
    for_lanes(mask, [&](uint32_t lane) {
        Cta& cta = warp.cta;
        Product p{};
        p.data = &data;
        p.shape = decode_descriptor(data, warp.lanes<uint32_t>(data.instruction)[lane]);
        warp.count_size(p.shape.m, p.shape.n);
        p.d = static_cast<uint32_t>(data.d.at(warp, lane));
        if (data.a_in_tensor_memory) {
            p.a_tensor = static_cast<uint32_t>(data.a_address.at(warp, lane));
            if (p.shape.a_mn_major) raise(Fault::kIllegalInstruction, "A in tensor memory cannot be transposed");
        } else {
            p.a = warp.lanes<uint64_t>(data.a)[lane];
        }
        p.b = warp.lanes<uint64_t>(data.b)[lane];
        p.accumulate = enable >> lane & 1;
        for (uint32_t word = 0; word < i.list_size[0]; ++word) {
            p.disabled[word] = warp.lanes<uint32_t>(i.list[0][word])[lane];
        }
        Cta* first = &cta;
        Cta* ctas[2] = {&cta, nullptr};
        if (data.group == 2) {
            const uint32_t even = cta.rank & ~1u;
            if (even + 1 >= cta.cluster.ctas.size()) {
                raise(Fault::kIllegalInstruction, ".cta_group::2 without a pair of CTAs");
            }
            first = ctas[0] = cta.cluster.ctas[even].get();
            ctas[1] = cta.cluster.ctas[even + 1].get();
        }
        check_and_record(warp, ctas, p);
        if (warp.machine.forms) note_forms(*warp.machine.forms, p);
        const std::string what = "tcgen05.mma: " + warp.program.where(warp.pc());
        Cta *low = ctas[0], *high = ctas[1];
        warp.machine.async.submit(
            first->tensor_pipe.queue,
            [low, high, p] {
                Cta* const both[2] = {low, high};
                run_product(both, p);
            },
            {}, what);
    });
    return Step::kNext;
}

void decode_mma(DecodeContext& c) {
    c.allow(1,
            "mma cta_group::1 cta_group::2 kind::f16 kind::f8f6f4 collector::a::fill collector::a::use "
            "collector::a::lastuse collector::a::discard");
    c.set_role(kRoleAsyncProxy);
    auto data = std::make_shared<ProductData>();
    data->group = decode_cta_group(c);
    data->half = c.has("kind::f16");
    if (!data->half && !c.has("kind::f8f6f4")) c.fail("only kind::f16 and kind::f8f6f4 are supported");
    data->d = decode_address(c, c.operand(0), 4);
    data->a_in_tensor_memory = c.operand(1).kind == SyntaxOperand::Kind::kAddress;
    if (data->a_in_tensor_memory) {
        data->a_address = decode_address(c, c.operand(1), 4);
    } else {
        data->a = c.read(1, 8);
    }
    data->b = c.read(2, 8);
    data->instruction = c.read(3, 4);
    size_t next = 4;
    if (c.operand(next).kind == SyntaxOperand::Kind::kVector) {
        c.read_list(0, c.operand(next++), 4);
        if (c.out.list_size[0] != 4 * data->group) c.fail("the mask of disabled lanes has 4 words per CTA");
    }
    c.out.c = c.read_predicate(c.operand(next++), &c.out.negate_predicate);
    if (next != c.operand_count()) c.fail("scale-input-d is not supported");
    c.out.data = std::move(data);
    c.out.handler = multiply;
}

struct CommitData : InstructionData {
    AddressOperand barrier;
    uint32_t ctas = kNoRegister;
    uint32_t group = 1;
};

// An arrival at the mbarrier once everything that the warp has given to the tensor core has completed.
Step commit(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const CommitData&>(*i.data);
    Checker& checker = warp.machine.checker;
    TensorMemoryAccess& access = warp.tensor_memory;
    access.make_streams(warp);
    for_lanes(mask, [&](uint32_t lane) {
        Cta& cta = warp.cta;
        const MemoryReference at = resolve_shared(warp, data.barrier.shared_at(warp, lane), 8, 8);
        std::vector<Cta*> signalled;
        if (data.ctas == kNoRegister) {
            signalled.push_back(at.owner);
        } else {
            const uint32_t ctas = warp.lanes<uint16_t>(data.ctas)[lane];
            if (ctas >> cta.cluster.ctas.size()) {
                raise(Fault::kIllegalInstruction, "tcgen05.commit to CTAs 0x%x of a cluster of %zu", ctas,
                      cta.cluster.ctas.size());
            }
            for (auto& other : cta.cluster.ctas) {
                if (ctas >> other->rank & 1) signalled.push_back(other.get());
            }
        }
        for (Cta* owner : signalled) {
            checker.shared_access(warp, lane, *owner, at.offset, 8, AccessKind::kAtomic);
            owner->memory_barriers.at(*owner, at.offset).is_committed_to = true;
        }
        const SyncClock past =
            checker.products_done(checker.agent(warp, access.product_stream, access.product_epoch, true));
        Cta* first = data.group == 2 ? cta.cluster.ctas[cta.rank & ~1u].get() : &cta;
        warp.machine.async.submit(
            first->tensor_pipe.queue,
            [signalled = std::move(signalled), offset = at.offset, past, &warp, pc = warp.pc()] {
                for (Cta* owner : signalled) {
                    if (!owner->live_threads()) {  // known-good kernels do so at their end
                        const std::string by = format("CTA rank %u warp %u at %s", warp.cta.rank, warp.index,
                                                      warp.program.where(pc).c_str());
                        warp.machine.checker.report_once(
                            pc, pc,
                            format("hazard: tcgen05.commit signals CTA rank %u, which has ended\n  by %s", owner->rank,
                                   by.c_str()));
                        continue;
                    }
                    MemoryBarriers& barriers = owner->memory_barriers;
                    warp.machine.checker.check_arrival(warp, past.knowledge, pc, barriers.at(*owner, offset), offset);
                    barriers.arrive(*owner, offset, 1, past);
                }
            },
            {}, "tcgen05.commit: " + warp.program.where(warp.pc()));
    });
    ++access.product_epoch;
    return Step::kNext;
}

void decode_commit(DecodeContext& c) {
    c.allow(1, "commit cta_group::1 cta_group::2 mbarrier::arrive::one shared::cluster multicast::cluster b64");
    c.set_role(kRoleSynchronization);
    auto data = std::make_shared<CommitData>();
    data->group = decode_cta_group(c);
    data->barrier = decode_address(c, c.operand(0), 4);
    if (c.has("multicast::cluster")) data->ctas = c.read(1, 2);
    c.out.data = std::move(data);
    c.out.handler = commit;
}

}  // namespace

void register_tcgen05_mma(OpcodeTable& table) {
    table.add("tcgen05.mma", decode_mma);
    table.add("tcgen05.commit", decode_commit);
}

}  // namespace ptx_emulator
