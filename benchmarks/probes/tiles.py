"""python tiles.py OUT [--warm K N]: tiles with deeper pipelines, filters that lie either way, and no division in the loop. old_tile.py is
`conv_tile.py` of commit 98e2bf7, new_tile.py that of a9ba131."""
import sys, re, ast, time, itertools, statistics, os, json
import torch, triton
sys.path[:0]=['.']
import old_tile, new_tile
from msplit.engines.cuda.autotune import tuner as contest, tickets
OUTS=sys.argv[1]
SHAPES=[]
for name in ('inception_v3','googlenet'):
    for line in open(f'benchmarks/probes/convolutions_{name}.txt'):
        m=re.match(r'(\d+)x (\([^)]*\)) (\([^)]*\)) s(\d) lib ([\d.]+)/([\d.]+)',line)
        if m: SHAPES.append((name,int(m[1]),ast.literal_eval(m[2]),ast.literal_eval(m[3]),int(m[4])))
SHAPES=[s for s in SHAPES if s[2][2]>=16]
TILES=[(16,32,64,4),(16,32,128,4),(32,32,64,4),(32,32,128,4),(32,64,64,4),(64,32,64,4),(64,64,64,4),(64,64,32,4),(16,64,64,4),(64,32,128,4)]
STAGES=(3,5,8)
def fits(t,st): return (t[0]+t[1])*t[2]*4*(st-1)<=200_000
def geometry(xs,ws,s):
    H,W,C=xs; kh,kw,_,O=ws
    if s==1: ph,pw=(kh-1)//2,(kw-1)//2; oh,ow=H,W
    else: ph=pw=0; oh,ow=(H-kh)//s+1,(W-kw)//s+1
    return ph,pw,oh,ow
def run(mod,x,flat,bias,g,s,kw,tile,stages,parts,in_first):
    P,R,S,warps=tile; ph,pw,oh,ow=g; _,H,W,C=x.shape; taps,_,O=flat.shape
    pixels=oh*ow; out=x.new_empty(pixels*O); grid=(triton.cdiv(pixels,P),triton.cdiv(O,R))
    steps=taps*triton.cdiv(C,S); share=triton.cdiv(steps,parts); parts=triton.cdiv(steps,share)
    if parts>1:
        counters=tickets.take(x.device,grid[0]*grid[1]); partial=x.new_empty(parts*grid[0]*grid[1]*P*R)
    else: counters=partial=out
    IN=16 if C%16==0 else 4; OUT=16 if O%16==0 else 4 if O%4==0 else 1
    of_filter=IN if in_first else OUT
    st=x.stride()[:3]; fs=flat.stride()
    kwargs={}
    if mod is new_tile: kwargs['EVEN']=C%S==0
    mod.convolve_tile[(*grid,parts)](x,flat,bias,x,out,partial,counters,pixels,H,W,C//IN,O//OUT,0,0,0,oh,ow,kw,taps,s,s,1,1,ph,pw,*(q//IN for q in st),*(q//of_filter for q in fs),share,parts,
      PIXELS=P,RESULTS=R,SUMMANDS=S,ALIGNED=64,IN=IN,OUT=OUT,IN_FIRST=in_first,POINT=taps==1 and ph==pw==0,NARROW=False,BIAS=True,SIDE=False,RELU=True,PRECISION='tf32',SPLIT=parts>1,SIBLINGS=False,num_warps=warps,num_stages=stages,**kwargs)
    return out.view(1,oh,ow,O)
def variants(shape):
    name,n,xs,ws,s=shape; ph,pw,oh,ow=geometry(xs,ws,s); C,O=ws[2],ws[3]; taps=ws[0]*ws[1]
    for tile in TILES:
        blocks=-(-oh*ow//tile[0])*-(-O//tile[1]); steps=taps*-(-C//tile[2])
        if blocks>1200: continue
        for parts in (1,2,4,8):
            if parts>1 and not (48<=blocks*parts<=300 and steps>=2*parts): continue
            for st in STAGES:
                if not fits(tile,st): continue
                yield ('new',tile,st,parts,True)
                if tile[0]<64: yield ('new',tile,st,parts,False)
                if st==3 and tile in ((16,32,64,4),(32,32,64,4),(32,32,32,4)): yield ('old',tile,st,parts,False)
MODS={'old':old_tile,'new':new_tile}
def setup(shape):
    name,n,xs,ws,s=shape
    torch.manual_seed(0)
    x=torch.randn((1,*xs),device='cuda'); w=torch.randn(ws,device='cuda')/(ws[0]*ws[1]*ws[2])**.5; b=torch.randn(ws[3],device='cuda')
    hwio=w.reshape(-1,ws[2],ws[3]).contiguous(); ohwi=w.permute(3,0,1,2).contiguous().view(ws[3],-1,ws[2]).permute(1,2,0)
    return x,w,b,hwio,ohwi
def kinds(v,shape):
    name,n,xs,ws,s=shape
    return (v[0],v[1],v[2],v[3]>1,v[4],ws[0]*ws[1]==1 and s==1 or (ws[0]*ws[1]==1), ws[3]%16, ws[2]%v[1][2]==0)
if '--warm' in sys.argv:
    k,N=map(int,sys.argv[-2:]); done=set(); i=0
    with tickets.lent():
      for shape in SHAPES:
        for v in variants(shape):
            kk=kinds(v,shape)
            if kk in done: continue
            done.add(kk); i+=1
            if i%N!=k: continue
            x,w,b,hwio,ohwi=setup(shape); g=geometry(shape[2],shape[3],shape[4])
            try: run(MODS[v[0]],x,ohwi if v[4] else hwio,b,g,shape[4],shape[3][1],v[1],v[2],v[3],v[4])
            except Exception as e: print('warm',v,str(e)[:100],flush=True)
    sys.exit()
torch.backends.cudnn.allow_tf32=True; torch.backends.cuda.matmul.allow_tf32=True
t0=time.time(); results=[]; f=open(OUTS+'/convprobe.txt','w')
contest.RUNS=11
LIMIT=float(os.environ.get('LIMIT','150'))
for shape in SHAPES:
    if time.time()-t0>LIMIT: print('out of time at',shape); break
    name,n,xs,ws,s=shape; x,w,b,hwio,ohwi=setup(shape); g=geometry(xs,ws,s)
    wl=w.permute(3,2,0,1).contiguous(memory_format=torch.channels_last); xl=x.permute(0,3,1,2)
    def lib():
        return torch.ops.aten.cudnn_convolution_relu(xl,wl,b,(s,s),(g[0],g[1]),(1,1),1)
    ref=lib().permute(0,2,3,1); big=ref.abs().max().item()
    rows=[]
    with torch.no_grad():
        L1,L3,L8=(1e2*contest.milliseconds(lib,k) for k in (1,3,8))
        for v in variants(shape):
            call=lambda v=v: run(MODS[v[0]],x,ohwi if v[4] else hwio,b,g,s,ws[1],v[1],v[2],v[3],v[4])
            try:
                with tickets.lent(): y=call()
                err=(y-ref).abs().max().item()/big
                if err>5e-3: print('WRONG',shape,v,err,flush=True); continue
                rows.append((1e2*contest.milliseconds(call),v,call))
            except Exception as e: print('ERR',shape,v,str(e)[:120],flush=True)
        rows.sort(key=lambda r:r[0])
        olds=[r for r in rows if r[1][0]=='old'][:1]; hw=[r for r in rows if r[1][0]=='new' and not r[1][4]][:1]
        top=[]
        for r in rows[:5]+olds+hw:
            if r not in top: top.append(r)
        out=[(r[0],1e2*contest.milliseconds(r[2],3),1e2*contest.milliseconds(r[2],8),r[1]) for r in top]
    results.append(dict(shape=shape,lib=(L1,L3,L8),rows=[(r[0],r[1]) for r in rows],top=out))
    line=f'{name} {n}x {xs} {ws} s{s} lib {L1:.1f}/{L3:.1f}/{L8:.1f} | '+'; '.join(f'{a:.1f}/{c:.1f}/{d:.1f} {v[0]}{"I" if v[4] else "O"} {"x".join(map(str,v[1]))}x{v[2]}p{v[3]}' for a,c,d,v in out)
    print(line,file=f,flush=True)
    json.dump(results,open(OUTS+'/convprobe.json','w'))
print(open(OUTS+'/convprobe.txt').read()); print('took',time.time()-t0)
