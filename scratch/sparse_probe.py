"""Correctness of block masks and times of the building blocks. Usage: PYTHONPATH=. python scratch/sparse_probe.py"""
import statistics, sys, time, traceback
import cupy, numpy as np
import cupy_sdpa
from cupy_sdpa import attention, attention_backward, block_mask, BlockMask, zoo
from benchmarks.common.timing import device_ms, interleaved, host_us
from benchmarks.common.device import random_normal, busy_matrix
D,H=128,16
busy,_=busy_matrix()
def timed(name, call, rounds=7):
    try:
        call()
        t=[device_ms([call]*3,busy,16) for _ in range(rounds+1)][1:]
        print(f"{name:40} {1e3*statistics.median(t):9.1f} us", flush=True)
    except Exception as e:
        print(name, "FAILED", type(e).__name__, str(e)[:300], flush=True)
rng=np.random.default_rng(0)
def problems(S):
    n=S//128
    doc=np.sort(rng.integers(0,S//1024,S)).astype(np.int32)
    table=(rng.random((n,n))<1/8); table[np.arange(n),np.arange(n)]=True
    cuts=np.repeat(np.arange(S//1024),1024).astype(np.int32)
    def same(b,h,q,k,d): return d[q]==d[k]
    def causal_same(b,h,q,k,d): return (q>=k)&(d[q]==d[k])
    return {
     "document":(same,{"d":doc}), "causal_document":(causal_same,{"d":doc}), "block_diagonal":(same,{"d":cuts}),
     "window":(zoo.sliding_window(1023),{}), "prefix":(lambda b,h,q,k,p: (k<p[b])|(q>=k),{"p":np.array([S//4],np.int32)}),
     "dilated":(zoo.dilated(1024,2),{}), "natten":(zoo.natten(128,8),{}), "streaming":(zoo.streaming(1024,4),{}),
     "random":(None,table),
    }
for S in (8192,):
    q,k,v=(random_normal(D,H,S,1) for _ in range(3))
    for name,(f,t) in problems(S).items():
        try:
            t0=time.time()
            if f is None:
                mask=BlockMask.from_blocks(t)
                big=np.asfortranarray(np.repeat(np.repeat(t,128,0),128,1)[:,:,None,None])
                plain=dict(mask=cupy.asarray(big))
            else:
                tt={n:cupy.asarray(x) for n,x in t.items()}
                mask=block_mask(f,S,S,tensors=tt or None, **({"batch":1} if name=="prefix" else {}))
                plain=dict(mask_mod=f,tensors=tt) if tt else dict(mask_mod=f)
            cupy.cuda.Device().synchronize(); t1=time.time()
            from cupy_sdpa.sparse import plan as plans
            method=plans.plan_of(mask,plans.Sizes(H,H,1)).method
            out=cupy.full((D,H,S,1),np.nan,dtype=q.dtype,order="F")
            a,sa=attention(q,k,v,block_mask=mask,return_stats=True,out=out)
            b,sb=attention(q,k,v,return_stats=True,**plain)
            err=float(abs(a.astype("f4")-b.astype("f4")).max()); errs=float(abs(sa-sb).max())
            print(f"--- {S} {name}: {mask} {method}; created in {t1-t0:.2f} s; max difference out {err:.4f} stats {errs:.5f}", flush=True)
            timed(f"{S} {name} block_mask", lambda: attention(q,k,v,block_mask=mask,out=out))
            timed(f"{S} {name} mask_mod", lambda: attention(q,k,v,out=out,**plain),3)
            do=random_normal(D,H,S,1); G=[cupy.full(x.shape,np.nan,dtype=x.dtype,order="F") for x in (q,k,v)]
            g1=attention_backward(do,q,k,v,a,sa,block_mask=mask,dq=G[0],dk=G[1],dv=G[2]); g2=attention_backward(do,q,k,v,b,sb,**plain)
            print("   gradients, relative to the largest", [round(float(abs(x.astype("f4")-y.astype("f4")).max()/abs(y.astype("f4")).max()),5) for x,y in zip(g1,g2)])
            timed(f"{S} {name} block_mask backward", lambda: attention_backward(do,q,k,v,a,sa,block_mask=mask,dq=G[0],dk=G[1],dv=G[2]))
            timed(f"{S} {name} block_mask backward det", lambda: attention_backward(do,q,k,v,a,sa,block_mask=mask,dq=G[0],dk=G[1],dv=G[2],deterministic=True),3)
            timed(f"{S} {name} mask_mod backward", lambda: attention_backward(do,q,k,v,b,sb,**plain),3)
            print("   host us", round(host_us(lambda: attention(q,k,v,block_mask=mask,out=out),50),1))
        except Exception:
            traceback.print_exc(limit=4)
# per-head patterns, grouped heads, two batch entries, odd lengths
for (hq,hkv,sq,skv,b,per_head,per_entry) in ((8,2,1000,1300,2,True,True),(8,2,1024,1024,2,False,True),(4,4,300,257,3,True,False)):
    q=random_normal(D,hq,sq,b); k,v=(random_normal(D,hkv,skv,b) for _ in range(2))
    dense=rng.random((skv,sq,hq if per_head else 1,b if per_entry else 1))<.5
    kill=np.repeat(np.repeat(rng.integers(0,3,(-(-skv//128),-(-sq//128),*dense.shape[2:])),128,0),128,1)[:skv,:sq]
    dense=np.asfortranarray(np.where(kill==0,False,np.where(kill==1,True,dense)))
    dd=cupy.asarray(dense)
    try:
        mask=block_mask(lambda b,h,q,k,m:m[k,q,h if per_head else 0,b if per_entry else 0],sq,skv,heads=hq if per_head else None,batch=b if per_entry else None,tensors={"m":dd})
        assert (mask.to_dense()==dense).all()
        for _ in range(5):
            a,sa=attention(q,k,v,block_mask=mask,return_stats=True)
        bb,sb=attention(q,k,v,mask=dd,return_stats=True)
        fin=np.isfinite(cupy.asnumpy(sb)); ok=(np.isfinite(cupy.asnumpy(sa))==fin).all()
        do=random_normal(*q.shape); g1=attention_backward(do,q,k,v,a,sa,block_mask=mask); g2=attention_backward(do,q,k,v,bb,sb,mask=dd)
        print("gradients",[round(float(abs(x.astype("f4")-y.astype("f4")).max()/abs(y.astype("f4")).max()),5) for x,y in zip(g1,g2)])
        print(mask, "same fully masked rows", ok, "out", float(abs(a.astype("f4")-bb.astype("f4")).max()), "stats", abs(cupy.asnumpy(sa)-cupy.asnumpy(sb))[fin].max())
    except Exception: traceback.print_exc(limit=4)
# building blocks, 8192, 8 blocks of 64 per query block
S,P,E=8192,8,64
q,k,v,o,do=(random_normal(D,H,S,1) for _ in range(5))
table=np.asfortranarray(np.stack([np.sort(rng.choice(E,P,replace=False)) for _ in range(E)]).T.astype(np.int32))
T,L=cupy.asarray(table,order="F"),cupy.full(E,P*128,np.int32)
cu=cupy.arange(0,S+1,128,dtype=np.int32)
kp,vp=(x.reshape((D,H,128,E),order="F") for x in (k,v))
q3,o3,q4,o4=q[...,0],o[...,0],q.reshape((D,H,128,E),order="F"),o.reshape((D,H,128,E),order="F")
st3=cupy.empty((H,S),np.float32,order="F"); st4=cupy.empty((128,H,E),np.float32,order="F")
pg=dict(page_table=T,seq_lens_kv=L)
timed("dense attention", lambda: attention(q,k,v,out=o))
timed("packed queries, 8 pages", lambda: attention(q3,kp,vp,cu_seqlens_q=cu,max_seqlen_q=128,out=o3,**pg))
timed("packed queries, 8 pages, stats", lambda: attention(q3,kp,vp,cu_seqlens_q=cu,max_seqlen_q=128,out=o3,stats=st3,**pg))
timed("dense queries, 8 pages", lambda: attention(q4,kp,vp,out=o4,**pg))
timed("dense queries, 8 pages, stats", lambda: attention(q4,kp,vp,out=o4,stats=st4,**pg))
m16=cupy.asarray((rng.random((P*128,128,E))<.5).astype(np.float16),order="F"); mb=cupy.asarray((rng.random((P*128,128,E))<.5).astype(np.float32),order="F")
f=lambda b,h,q_idx,kv_idx,a: a[kv_idx,q_idx,b]!=0
timed("dense queries, 8 pages, mask array f16", lambda: attention(q4,kp,vp,out=o4,mask_mod=f,tensors={"a":m16},**pg))
timed("packed queries, 8 pages, mask array f16", lambda: attention(q3,kp,vp,cu_seqlens_q=cu,max_seqlen_q=128,out=o3,mask_mod=f,tensors={"a":m16},**pg))
timed("dense queries, 8 pages, mask array f32", lambda: attention(q4,kp,vp,out=o4,mask_mod=f,tensors={"a":mb},**pg))
bias=cupy.where(m16!=0,np.float16(0),np.float16(-np.inf))[:,:,None,:]; bias=cupy.asfortranarray(bias)
timed("dense queries, 8 pages, bias f16 -inf", lambda: attention(q4,kp,vp,out=o4,bias=bias,**pg))
fi=lambda b,h,q_idx,kv_idx: (q_idx+kv_idx)%2==0
timed("dense queries, 8 pages, index function", lambda: attention(q4,kp,vp,out=o4,mask_mod=fi,**pg))
qp,kpos=(cupy.asarray(rng.integers(0,9000,s).astype(np.int32),order="F") for s in ((128,E),(P*128,E)))
fp=lambda b,h,q_idx,kv_idx,x,y: x[q_idx,b]>=y[kv_idx,b]
timed("dense queries, 8 pages, positions function", lambda: attention(q4,kp,vp,out=o4,mask_mod=fp,tensors={"x":qp,"y":kpos},**pg))
fb=lambda b,h,q_idx,kv_idx: q_idx>=kv_idx
timed("dense queries, 8 pages, causal bottom right", lambda: attention(q4,kp,vp,out=o4,causal="bottom_right",**pg))
# copies
from cupy_sdpa.device.blocks.copies import copy_blocks
from cupy_sdpa.device.blocks.results import merge_blocks, sum_blocks, Sources
items=cupy.asarray(np.array([(i,0,0) for i in range(E)],np.int32))
timed("copy 64 query blocks", lambda: copy_blocks(q,items,H))
items8=cupy.asarray(np.array([(i%E,0,0) for i in range(8*E)],np.int32))
timed("copy 512 query blocks", lambda: copy_blocks(q,items8,H))
src=Sources(cupy.arange(E+1,dtype=np.int32),cupy.arange(E,dtype=np.int32),1)
base=cupy.zeros((H,S,1),np.float32,order="F").transpose(1,0,2)
timed("merge 64 query blocks into out", lambda: merge_blocks(src,o4,st4,o,None,base,None))
src8=Sources(cupy.arange(0,8*E+1,8,dtype=np.int32),cupy.asarray(rng.permutation(8*E).astype(np.int32)),1)
big=random_normal(D,H,128,8*E)
timed("sum 512 blocks into 64", lambda: sum_blocks(src8,big,o))
# backward
out,stats=attention(q,k,v,return_stats=True)
g=[cupy.empty_like(x) for x in (q,k,v)]
timed("bwd dense", lambda: attention_backward(do,q,k,v,out,stats,dq=g[0],dk=g[1],dv=g[2]))
n=8*E*128
Q,DO,O=(random_normal(D,H,n) for _ in range(3)); K,V=(random_normal(D,H,S) for _ in range(2)); st=cupy.zeros((H,n),np.float32,order="F")
cuq=cupy.arange(0,n+1,1024,dtype=np.int32)
G=[cupy.empty_like(x) for x in (Q,K,V)]
for det in (False,True):
    timed(f"bwd packed 64 x (1024 queries, 128 keys) det {det}", lambda: attention_backward(DO,Q,K,V,O,st,cu_seqlens_q=cuq,cu_seqlens_kv=cu,max_seqlen_q=1024,max_seqlen_kv=128,dq=G[0],dk=G[1],dv=G[2],deterministic=det))
s2=cupy.zeros((H,S),np.float32,order="F")
timed("bwd packed 64 x (128 queries, 1024 keys)", lambda: attention_backward(do[...,0],q3,Q,DO,o3,s2,cu_seqlens_q=cu,cu_seqlens_kv=cuq,max_seqlen_q=128,max_seqlen_kv=1024,dq=G[1],dk=G[0],dv=O))
R=lambda x,r: x.reshape((D,H,r,E),order="F")
s4=cupy.zeros((1024,H,E),np.float32,order="F"); s5=cupy.zeros((128,H,E),np.float32,order="F")
timed("bwd batch 64 x (1024 queries, 128 keys)", lambda: attention_backward(R(DO,1024),R(Q,1024),R(K,128),R(V,128),R(O,1024),s4,dq=R(G[0],1024),dk=R(G[1],128),dv=R(G[2],128)))
timed("bwd batch 64 x (128 queries, 1024 keys)", lambda: attention_backward(R(do,128),R(q,128),R(Q,1024),R(DO,1024),R(o,128),s5,dq=R(G[1],128),dk=R(G[0],1024),dv=R(O,1024)))
timed("bwd batch 64 x (128 queries, 1024 keys) f16 mask", lambda: attention_backward(R(do,128),R(q,128),R(Q,1024),R(DO,1024),R(o,128),s5,dq=R(G[1],128),dk=R(G[0],1024),dv=R(O,1024),mask_mod=f,tensors={"a":m16}))
mt=cupy.asarray((rng.random((128,1024,E))<.5).astype(np.float16),order="F")
timed("bwd batch 64 x (1024 queries, 128 keys) f16 mask", lambda: attention_backward(R(DO,1024),R(Q,1024),R(K,128),R(V,128),R(O,1024),s4,dq=R(G[0],1024),dk=R(G[1],128),dv=R(G[2],128),mask_mod=f,tensors={"a":mt}))
