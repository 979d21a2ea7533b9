"""python cold_weights.py OUT: is it cold weights or changing kernels that make a step slower than its kernels alone?"""
import sys, time, statistics
import torch, triton
sys.argv=[sys.argv[0],sys.argv[1]]
exec(open('benchmarks/probes/tiles.py').read().split("if '--warm' in sys.argv")[0])
torch.backends.cudnn.allow_tf32=True; torch.backends.cuda.matmul.allow_tf32=True
flushing=torch.empty(160<<20,dtype=torch.uint8,device='cuda')
def timed(calls,flush=False,runs=15):
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream()); g=torch.cuda.CUDAGraph()
    with torch.cuda.stream(s), tickets.lent():
        for c in calls[:60]: c()
        s.synchronize(); g.capture_begin(capture_error_mode='relaxed'); kept=[c() for c in calls]; g.capture_end()
        ts=[]
        for _ in range(runs):
            if flush: flushing.zero_()
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    g.reset(); return 1e3*statistics.median(ts)
sel=[]; seen=set()
for sh in SHAPES:
    if sh[0]=='inception_v3' and sh[2][0] in (17,8,35) and tuple(sh[3]) not in seen and len(sel)<26: seen.add(tuple(sh[3])); sel.append(sh)
def make(sh,conf,copies=1):
    x,w,b,hwio,ohwi=setup(sh); g=geometry(sh[2],sh[3],sh[4]); xl=x.permute(0,3,1,2); out=[]
    for k in range(copies):
        if conf=='lib':
            wl=w.permute(3,2,0,1).contiguous(memory_format=torch.channels_last)
            out.append(lambda wl=wl: torch.ops.aten.cudnn_convolution_relu(xl,wl,b,(sh[4],)*2,(g[0],g[1]),(1,1),1))
        else:
            f=(ohwi if conf[4] else hwio); f2=torch.empty_strided(f.shape,f.stride(),device='cuda').copy_(f)
            out.append(lambda f2=f2: run(MODS[conf[0]],x,f2,b,g,sh[4],sh[3][1],conf[1],conf[2],conf[3],conf[4]))
    return out
def pick(sh,tiles,stages=3):
    best=None
    for v in variants(sh):
        if v[0]=='new' and v[4] and (v[1],v[2])==(tiles,stages):
            c=make(sh,v)[0]
            try: t=timed([c]*10,runs=7)
            except Exception as e: continue
            if best is None or t<best[0]: best=(t,v)
    return best[1] if best else None
t0=time.time()
sets={'lib':['lib']*len(sel)}
for st in (3,5): sets[f'64x32x64 s{st}']=[pick(s,(64,32,64,4),st) for s in sel]
for st in (3,5): sets[f'32x32x64 s{st}']=[pick(s,(32,32,64,4),st) for s in sel]
sets['mixed']=[sets[('64x32x64 s3','32x32x64 s3','lib')[i%3]][i] for i in range(len(sel))]
print('picked',time.time()-t0,flush=True)
def table(name,confs):
    singles=[make(s,c)[0] for s,c in zip(sel,confs)]
    cold=[make(s,c,20) for s,c in zip(sel,confs)]
    hot=[timed([c]*20)/20 for c in singles]
    rr=timed(singles*6)/6
    rev=timed((singles+singles[::-1])*3)/6
    coldw=[timed(cs,flush=True)/20 for cs in cold]
    rrc=timed([cs[k] for k in range(6) for cs in cold],flush=True)/6
    rrc2=timed([cs[k%1] for k in range(6) for cs in cold])/6
    print(f'{name:14s} hot sum {sum(hot):6.1f}  round robin {rr:6.1f} back and forth {rev:6.1f}  cold weights, same kernel {sum(coldw):6.1f}  cold weights, round robin {rrc:6.1f}',flush=True)
    return hot,coldw
allr={}
for n,c in sets.items():
    if all(c): allr[n]=table(n,c)
    else: print(n,'missing',[s for s,v in zip(sel,c) if v is None])
for i,s in enumerate(sel):
    print(s[2:],' '.join(f'{n}: {h[i]:.1f}/{c[i]:.1f}' for n,(h,c) in allr.items()),flush=True)
print('bytes',sum(4*s[3][0]*s[3][1]*s[3][2]*s[3][3] for s in sel)/1e6,'took',time.time()-t0)
